"""Training by imitation: demonstrations in, a run directory out, without a simulator until the final evaluation. Only a
policy that was grounded keeps seeing scenes: as few demonstrations as one has would make it forget where things are.

Demonstrations ── split by episode ──► train chunks ──► SFT.update ──► average weights ──► validation loss
                                  └──► validation chunks ───│──────────────┘
                                               Pictures ────┘

The last average is kept, or with ``patience`` the one with the lowest validation loss: success goes on growing for long
after that loss has its minimum (docs/flow_rl.md).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algos.sft import SFT
from embodied.core.errors import UserError
from embodied.core.protocols import Precomputing
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.data import Demonstrations, read
from embodied.data.lerobot import check_fits
from embodied.report.progress import Progress
from embodied.run import factories
from embodied.run.config import RunConfig
from embodied.run.evaluation import evaluate_policy
from embodied.runtime import threads
from embodied.runtime.checkpoint import Checkpoint
from embodied.training.scenes import Pictures
from embodied.training.supervised import SupervisedRun

VALIDATION_CHUNKS = 256  # at most; spread evenly over the validation episodes
CAPACITY = 8192  # observations of scenes to draw from
REUSE = 4.0  # how often one is drawn, on average


def imitate(
    config: RunConfig, run_dir: Path, found: Checkpoint | None, start_s: float, resumed: bool
) -> dict[str, Any]:
    """Train on ``config.data`` and evaluate; see ``SupervisedRun.carry_out``."""
    assert config.data is not None
    spec = factories.make_spec(config)
    data = read(Path(config.data), config.data_keys, [camera.name for camera in spec.cameras])
    check_fits(data, spec, Path(config.data))
    if spec.cameras:  # the policy reads instructions too
        data = data.told_from(spec.texts)
    threads.use(threads.available_cores())
    training = Imitation(config, run_dir, data, spec, new=found is None)
    with training.opened:
        return training.carry_out(found, start_s, resumed)


class Imitation(SupervisedRun):
    """The data of one run, split, and the algorithm that learns from it. UserError if they do not fit.

    A run that goes on learns from the same chunks as if it had not been stopped, but has other scenes, if any.
    """

    loss_name = "train/imitation_loss"
    algorithm: SFT

    def __init__(self, config: RunConfig, run_dir: Path, data: Demonstrations, spec: EnvSpec, new: bool = True) -> None:
        torch.manual_seed(config.seed)
        super().__init__(config, run_dir, spec, new)
        self.opened = ExitStack()  # the simulator, once it is there
        self.patience = self.algorithm.config.patience
        self.data = data
        self.train_episodes, self.validation_episodes = data.split(self.algorithm.config.validation_share)
        self.starts = data.chunk_starts(self.policy.horizon, self.train_episodes)
        starts = data.chunk_starts(self.policy.horizon, self.validation_episodes)
        self.validation_starts = starts[:: -(-len(starts) // VALIDATION_CHUNKS) or 1]
        if not len(self.starts) or not len(self.validation_starts):
            raise UserError(
                f"data={config.data}: its episodes are shorter than a chunk of {self.policy.horizon} actions"
            )
        if new and config.init is None:
            trained_on = torch.isin(data.episode_F, torch.tensor(self.train_episodes))
            self.algorithm.fit_normalizer({"state": data.state_FS[trained_on]})
            self.kept = self.algorithm.weights()

    @cached_property
    def pictures(self) -> Pictures:
        """Scenes for a policy that keeps what grounding taught it, first asked for as ``observed`` is."""
        config = self.config
        env = factories.make_env(config, config.num_envs, threads.available_cores(), self.run_dir)
        self.opened.callback(env.close)
        return Pictures(
            env, partial(factories.make_sampler, config), self.policy.execute,
            seed=config.seed, updates=self.algorithm.updates, capacity=CAPACITY, reuse=REUSE,
            masks=False, keep=lambda obs: self._precomputed(obs, CAPACITY),
        )  # fmt: skip

    @cached_property
    def observed(self) -> Obs:
        """Of all frames, with the frozen share of the policy in place of what it is computed from. First asked for by
        the first update: a run that goes on has its weights only then."""
        return self._precomputed(self.data.obs(slice(None)), len(self.data.state_FS))

    def _precomputed(self, obs: Obs, kept: int) -> Obs:
        """Of observations of which ``kept`` are kept together."""
        if isinstance(self.policy, Precomputing) and self.policy.may_keep(kept):
            return self.policy.precompute(obs)
        return obs

    def announcement(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.algorithm.policy.parameters())
        return (
            f"imitating {self.config.task['name']}: policy {self.config.policy['name']} ({parameters:,} parameters), "
            f"{len(self.train_episodes)} episodes to train on ({len(self.starts):,} chunks), "
            f"{len(self.validation_episodes)} to validate on, seed {self.config.seed} → {self.run_dir}"
        )

    def update(self) -> float:
        algorithm = self.algorithm
        obs, action_BHA = self.chunks(algorithm.pick(self.starts))
        scenes = self.pictures.draw(len(action_BHA), algorithm.generator) if algorithm.keeps_grounding else None
        return algorithm.update(obs, action_BHA, scenes)

    def validate(self) -> tuple[float, dict[str, float]]:
        return self.algorithm.validate(*self.chunks(self.validation_starts)), {}

    def evaluate(self, progress: Progress, trained: str) -> dict[str, Any] | None:
        episodes = self.config.eval_episodes
        if not episodes:
            return None
        progress.message(f"trained for {trained}; evaluating {episodes} episodes")
        return evaluate_policy(self.config, self.policy, episodes, self.config.seed)

    def chunks(self, starts_B: Tensor) -> tuple[Obs, Tensor]:
        """What was observed in frames ``starts``, or is precomputed of it, and the actions from there on, [B, H, A]."""
        obs = {key: value[starts_B] for key, value in self.observed.items()}
        return obs, self.data.actions(starts_B, self.policy.horizon)
