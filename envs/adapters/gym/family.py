"""The family ``gym``: every environment of gymnasium, ``task=gym/<id>`` or ``task=gym/<module>:<id>``.

Observations become terms of the state, named after their keys, and cameras where they are images. Actions of a Box are
scaled from [-1, 1]. An episode is seeded by its plan, so it is the same whatever the other envs do, and the time limit
is that of the plan. docs/simulators.md describes it for users.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.device import available_cores
from embodied.core.episodes import EpisodePlans, Ints
from embodied.core.errors import UserError
from embodied.core.spec import SUCCESS, Box, CameraSpec, EnvSpec, Instruction
from embodied.core.types import Obs
from embodied.envs.adapters.config import GymConfig, GymSimConfig
from embodied.envs.adapters.gym.probe import DEFAULT_DT_S, Probe, known_ids, probe
from embodied.envs.adapters.gym.processes import Layout, ProcessRows, allocate, is_portable
from embodied.envs.adapters.gym.rows import LocalRows, VectorRows
from embodied.envs.adapters.gym.spaces import RENDER, TIME, check_cameras, terms_of
from embodied.envs.base.episodic import Advance, EpisodicEnv
from embodied.envs.episodes.seeding import EpisodeRng

SLOW_STEP_S = 1e-4  # an env whose step takes longer gets processes of its own


class GymEnv(EpisodicEnv):
    """N environments of gymnasium."""

    def __init__(self, spec: EnvSpec, rows: LocalRows | VectorRows | ProcessRows, can_render: bool) -> None:
        super().__init__(spec, len(rows.arrays["reward"]))
        if can_render:
            self.film = lambda width, height: partial(rows.render, width, height)
        self.rows, self.arrays = rows, rows.arrays
        self._all = np.arange(self.num_envs)
        self._observed = {key: self.arrays[key] for key in spec.arrays if key in self.arrays}

    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        seeds = EpisodeRng(plans.seed_n, plans.number_n).uniform("gym", 0.0, 2.0**31).astype(np.int64)
        self.rows.start(ids, seeds)

    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        self.arrays["action"][:] = action_NA.numpy()  # envs that are not stepped do not read theirs
        self.rows.step(self._all if ids is None else ids)
        outcomes = {SUCCESS: torch.from_numpy(self.arrays["success"].copy())} if self.spec.has_success else {}
        failed_N, truncated_N = (
            torch.from_numpy(self.arrays[key].copy()) if self.arrays[key].any() else None
            for key in ("terminated", "truncated")
        )
        return Advance(torch.from_numpy(self.arrays["reward"].copy()), outcomes, failed_N, truncated_N=truncated_N)

    def observe(self, ids: Ints | None = None) -> Obs:
        return self.rows_of(self._observed, ids)

    def close(self) -> None:
        self.rows.close()


class Gym:
    """See ``embodied.envs.registry.Family``. The first ``spec`` of an environment builds one, to read its spaces."""

    few_copies = True

    def ids(self) -> Sequence[str]:
        return known_ids()

    def task_config(self, id: str) -> type[Any]:
        return GymConfig

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        found = probe(id, task.kwargs, task.success_key, task.max_episode_steps)
        name = f"gym/{id}"
        images, state = [name for leaf in found.leaves for name in leaf.frames], terms_of(found.leaves)
        available = [*images, *([RENDER] if found.can_render else [])]
        check_cameras(name, cameras, available, [] if state else images, found.action)
        stated = {
            "control_dt_s": task.control_dt_s or found.dt_s,
            "max_episode_steps": found.stated_steps,
        }
        text = task.instruction or id.rpartition(":")[2].rpartition("/")[2].partition("-v")[0]
        return EnvSpec(
            task=name,
            state=state or (TIME,),
            action=found.action,
            control_dt_s=stated["control_dt_s"] or DEFAULT_DT_S,
            max_episode_steps=found.source.max_episode_steps,
            cameras=tuple(cameras),
            instructions=(Instruction(text, goal=text),),
            action_mask=found.source.has_mask,
            outcomes=(SUCCESS,) if found.source.success else (),
            repeats="none" if found.source.registration.nondeterministic else "all",
            assumed=tuple(name for name, value in stated.items() if not value),
            images=tuple(images),
        )

    def make(
        self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Sequence[CameraSpec] = ()
    ) -> GymEnv:
        spec = self.spec(id, task, cameras)
        found = probe(id, task.kwargs, task.success_key, task.max_episode_steps)
        layout: Layout = {
            "action": ((spec.action_dim,), "float32" if isinstance(spec.action, Box) else "int64"),
            "reward": ((), "float32"),
            **dict.fromkeys(("terminated", "truncated", "success"), ((), "bool")),
            **spec.arrays,
        }
        if not terms_of(found.leaves):
            del layout["state"]
        processes = _processes(found, num_threads, sim)
        rows: LocalRows | VectorRows | ProcessRows
        if found.is_vector:
            rows = VectorRows(found.source, allocate(layout, num_envs), found.can_render)
        elif processes:
            rows = ProcessRows(found.source, layout, num_envs, processes, found.can_render)
        else:
            rows = LocalRows(found.source, allocate(layout, num_envs), range(num_envs), found.can_render)
        return GymEnv(spec, rows, found.can_render)


def _processes(found: Probe, num_threads: int, sim: GymSimConfig) -> int:
    """Return the number of processes; UserError if the environment cannot be built in others than this one."""
    wanted, name, why = sim.processes, found.source.name, ""
    if found.is_vector:
        why = f"task {name} steps all its environments together"
    elif not is_portable(found.source):
        why = f"what builds task {name} is not in a module that another process can import"
    if wanted and why:
        raise UserError(f"sim.processes: got {wanted}, allowed: 0, because {why}")
    if wanted is not None or why or found.step_s <= SLOW_STEP_S:
        return wanted or 0
    return num_threads or available_cores()
