"""Scenes with what the simulator knows of them: what cameras see while the expert and chance move the robot.

Scenes.look ──► observations [N, ...] and what is in them ──► Buffer of the newest ──► Pictures.draw: random batches

Beside the observation: ``named`` [N, 9], where the named object and place are, and where masks are asked for
``masks.<camera>``, the role of what each pixel shows, and ``described.<camera>``, which description fits it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from envs import MujocoPool

LOOKS = 10  # at a scene, before the next one
RANDOM_SHARE = 0.2  # of decisions are random: pictures from elsewhere than the expert's path


class Scenes:
    """Looks at the scenes of a pool, which must have cameras; episodes are cut short, so that there are many.

    steps: control steps between two looks. UserError for a task that does not tell what its bodies are.
    """

    def __init__(self, env: MujocoPool, sampler: EpisodeSampler, steps: int, seed: int, *, masks: bool = True) -> None:
        if env.rig is None or not env.task.roles():
            raise UserError(f"algo=grounding needs cameras and a task with masks; {env.task.name} does not have both")
        env.observe_segmentation = masks
        self.env, self.sampler, self.steps = env, sampler, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.looks = 0
        model = env.rig.model
        self._geoms = [(geom, model.body(body).name) for geom, body in enumerate(model.geom_bodyid)]
        blank_NG = torch.zeros(env.num_envs, model.ngeom + 1, dtype=torch.uint8)  # the last: no geom at all
        self._of_geoms = {"masks": blank_NG, "described": blank_NG.clone()}

    def look(self) -> Obs:
        """What all envs see next, [N, ...]. The first look is at the first scenes of the seed."""
        new = self.looks % LOOKS == 0
        obs = self.env.reset(self.sampler) if new else self._move()
        self.looks += 1
        told = {key: value for key, value in obs.items() if not key.startswith("segmentation.")}
        thing_N3, place_N3 = self.env.task.named()
        told["named"] = torch.cat((thing_N3, thing_N3 - self.env.view.tcp_pos, place_N3), -1).float()
        return told | self._shown(obs) if self.env.observe_segmentation else told

    def _shown(self, obs: Obs) -> Obs:
        """What the pixels of every camera show, [N, height, width]."""
        task, rows = self.env.task, torch.arange(self.env.num_envs)[:, None, None]
        known = {"masks": task.roles(), "described": {body: index + 1 for body, index in task.described().items()}}
        shown = {}
        for what, by_body in known.items():
            for geom, body in self._geoms:
                if body in by_body:
                    self._of_geoms[what][:, geom] = by_body[body]
            for camera in self.env.spec.cameras:
                geom_NHW = obs[f"segmentation.{camera.name}"].long()
                shown[f"{what}.{camera.name}"] = self._of_geoms[what][rows, geom_NHW]
        return shown

    def _move(self) -> Obs:
        """``steps`` control steps of the expert, or where chance says so of a random action, held; what is seen after
        them."""
        num, action_dim = self.env.num_envs, self.env.spec.action_dim
        random_NA = 2 * torch.rand(num, action_dim, generator=self.generator, dtype=torch.float64) - 1
        chance_N1 = torch.rand(num, 1, generator=self.generator) < RANDOM_SHARE
        for step in range(self.steps):
            self.env.observe_pictures = step == self.steps - 1
            obs = self.env.step(torch.where(chance_N1, random_NA, self.env.task.expert())).obs
        return obs


class Buffer:
    """The newest ``capacity`` observations."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.added = capacity, 0
        self._rows: Obs = {}

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, obs: Obs) -> None:
        """Take N more in, in the place of the oldest."""
        num = len(obs["state"])
        if not self._rows:
            self._rows = {key: value.new_empty((self.capacity, *value.shape[1:])) for key, value in obs.items()}
        place = torch.arange(self.added, self.added + num) % self.capacity
        for key, value in obs.items():
            self._rows[key][place] = value
        self.added += num

    def sample(self, num: int, generator: torch.Generator) -> Obs:
        """``num`` of them, drawn with replacement."""
        chosen = torch.randint(len(self), (num,), generator=generator)
        return {key: rows[chosen] for key, rows in self._rows.items()}

    def rows(self, *keys: str) -> Obs:
        """All that is there of some keys."""
        return {key: self._rows[key][: len(self)] for key in keys}


class Pictures:
    """Random batches of the newest observations of the scenes of a pool; new ones are made as they are needed, so that
    each is drawn ``reuse`` times on average.

    The scenes follow from the seed of the run and from how many updates it has made. steps: control steps between two
    looks. masks: whether they are told too. keep: what is kept of a look.
    """

    def __init__(
        self,
        env: MujocoPool,
        make_sampler: Callable[[EnvSpec, int, int], EpisodeSampler],
        steps: int,
        *,
        seed: int,
        updates: int,
        capacity: int,
        reuse: float,
        masks: bool = True,
        keep: Callable[[Obs], Obs] = lambda obs: obs,
    ) -> None:
        first_seed = first_env_seed(Purpose.SCENES, seed) + updates
        sampler = make_sampler(env.spec, env.num_envs, first_seed)
        self.scenes = Scenes(env, sampler, steps, first_seed, masks=masks)
        self.buffer, self.reuse, self.keep = Buffer(capacity), reuse, keep
        self.drawn = 0
        for _ in range(LOOKS):  # one look knows only robots at rest
            self._look()

    def draw(self, num: int, generator: torch.Generator) -> Obs:
        self.drawn += num
        while self.drawn > self.reuse * self.buffer.added:
            self._look()
        return self.buffer.sample(num, generator)

    def _look(self) -> None:
        self.buffer.add(self.keep(self.scenes.look()))
