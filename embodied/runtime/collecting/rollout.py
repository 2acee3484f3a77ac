"""Progress of one env group from fragment to fragment: its env, its sampler, its noise and its latest observations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.contract import check_obs, check_timestep
from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.execution import obs_to
from embodied.core.types import Obs, Timestep
from embodied.runtime.watch.track import Track


class GroupRollout:
    """Progress of one group. key: worker, group and incarnation. device: of recorded observations and actions."""

    def __init__(
        self,
        env: VecEnv,
        sampler: EpisodeSampler,
        key: tuple[int, int, int],
        decisions: int,
        execute: int,
        noise_shape: tuple[int, ...],
        seed: int,
        worker_track: Track,
        device: torch.device = CPU,
    ) -> None:
        self.env = env
        self.sampler = sampler
        self.decisions = decisions
        self.execute = execute
        self.noise_shape = noise_shape
        self.device = device
        self._noise_key = np.random.SeedSequence((seed, *key)).generate_state(2, np.uint64)
        self._drawn = 0  # decisions whose noise was drawn
        self.track = Track(f"group {key[1]}", "wait_ticket")
        self._worker_track = worker_track
        self._checked = False  # whether a step in which episodes ended has passed ``check_timestep``

    @cached_property
    def obs(self) -> Obs:
        """Input of the next decision of each env; its first reading resets the envs."""
        return self._reset()

    def enter(self, activity: str) -> None:
        """Begin an activity of the group and its worker."""
        self.track.enter(activity)
        self._worker_track.enter(activity)

    def check(self, step: Timestep, rows: Tensor | None = None) -> None:
        """Check the contract of the env until a step in which episodes end has passed. rows: envs of ``step``."""
        if not self._checked:
            check_timestep(self.env, step, self.execute, rows)
            self._checked = len(step.final_ids) > 0

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of sampler and noise, between fragments only.

        If the env can be resumed exactly, also of env and pending observation.
        """
        obs = self.obs
        state: dict[str, Any] = {
            "num_envs": self.env.num_envs,
            "sampler": self.sampler.state_dict(),
            "noise_drawn": self._drawn,
        }
        if self.env.resumes_exactly:
            state["env"] = {key: tensor.clone() for key, tensor in self.env.state_dict().items()}
            state["obs"] = {key: tensor.to(CPU, copy=True) for key, tensor in obs.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; an env that cannot be resumed exactly starts new episodes."""
        if not {"sampler", "noise_drawn"} <= state.keys():
            raise UserError(
                "the checkpoint is of a version of this code that kept other states of environments and cannot be "
                "resumed; start a new run from its policy with init=<run directory>"
            )
        if state["num_envs"] != self.env.num_envs:
            raise UserError(
                f"the checkpoint has {state['num_envs']} envs in a group, this run {self.env.num_envs}: keep num_envs"
            )
        self.sampler.load_state_dict(state["sampler"])
        self._drawn = state["noise_drawn"]
        if self.env.resumes_exactly:
            self.env.load_state_dict(state["env"], self.sampler)
            self.obs = {key: tensor.to(self.device, copy=True) for key, tensor in state["obs"].items()}
        else:
            self.obs = self._reset()

    def draw_noise(self) -> Tensor:
        """Draw the noise of the group's next decision, standard normals [N, *noise_shape].

        It is a function of the group's key and of the number of the decision. Generator: Philox (Salmon et al. 2011).
        Its key has 128 bits. A generator of torch uses 32 bits of its seed on the CPU, so some groups would be alike.
        """
        philox = np.random.Philox(key=self._noise_key, counter=self._drawn << 128)
        self._drawn += 1
        shape = (self.env.num_envs, *self.noise_shape)
        return torch.from_numpy(np.random.Generator(philox).standard_normal(shape, np.float32))

    def _reset(self) -> Obs:
        obs = obs_to(self.env.reset(self.sampler), self.device)
        check_obs(self.env, obs, self.env.num_envs, "reset()")
        return obs
