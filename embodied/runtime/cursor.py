"""Progress of one env group: a cursor that fills its fragments. ``env_worker`` describes its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.contract import check_obs, check_timestep
from embodied.core.device import CPU
from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.execution import obs_to, step_chunk
from embodied.core.protocols import ExactResume, VecEnv
from embodied.core.types import Fragment, Obs, Timestep
from embodied.runtime.ledger import Ticket
from embodied.runtime.messages import ActReply, ActRequest
from embodied.runtime.recorder import Ends, Recorder
from embodied.runtime.watch.track import Track


class Cursor:
    """Progress of one group. ``obs``: input of its next decision. ``ticket``: None between fragments."""

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
        self.worker, self.group, _ = key
        self.decisions = decisions
        self.execute = execute
        self.noise_shape = noise_shape
        self.device = device  # of the observations and actions that it records
        self._noise_key = np.random.SeedSequence((seed, *key)).generate_state(2, np.uint64)
        self._drawn = 0  # decisions whose noise was drawn
        self.obs: Obs | None = None
        self.ticket: Ticket | None = None
        self.track = Track(f"group {self.group}", "wait_ticket")
        self._worker_track = worker_track
        self._checked = False  # whether a step in which episodes ended has passed ``check_timestep``
        self._t = 0
        self._recorder: Recorder | None = None
        self._ended: Timestep | None = None  # of decision t-1, if episodes ended there

    def start(self, ticket: Ticket) -> ActRequest:
        assert self.ticket is None, "the group is in the middle of a fragment"
        if self.obs is None:
            self.obs = self._reset()
            check_obs(self.env, self.obs, self.env.num_envs, "reset()")
        self.ticket, self._t = ticket, 0
        self._recorder = Recorder(self.decisions, self.env.num_envs)
        return self._request()

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        assert self.ticket is not None
        assert self._recorder is not None
        assert self.obs is not None
        if self._ended is not None:
            self._record_end(self._ended, reply)
        obs = self.obs if reply.obs is None else reply.obs
        if reply.sample is None:
            assert reply.value_N is not None
            fragment = self._recorder.fragment(obs, reply.value_N, self.ticket)
            self.ticket = self._recorder = self._ended = None
            return fragment
        self._recorder.observe(self._t, obs)
        self.enter("step")
        action_NEA, step = step_chunk(self.env, reply.sample.action_NHA, self.execute, self.device)
        self.enter("record")
        self._check(step)
        self._recorder.decide(self._t, reply.sample, action_NEA)
        self._recorder.result(self._t, step)
        self.obs = step.obs
        self._ended = step if len(step.final_ids) else None
        self._t += 1
        return self._request()

    def enter(self, activity: str) -> None:
        """Begin an activity of the group and its worker."""
        self.track.enter(activity)
        self._worker_track.enter(activity)

    def _check(self, step: Timestep, rows: Tensor | None = None) -> None:
        """Check the contract of the env until a step in which episodes end has passed. rows: envs of ``step``."""
        if not self._checked:
            check_timestep(self.env, step, self.execute, rows)
            self._checked = len(step.final_ids) > 0

    def _record_end(self, step: Timestep, reply: ActReply) -> None:
        """Keep the last observations of the episodes that ended in ``step``, and the value of truncated ones."""
        assert self._recorder is not None
        assert reply.final_value_M is not None
        every = torch.arange(self.env.num_envs)
        ends = Ends.of(step, torch.full_like(every, self._t - 1), every)
        final_obs = step.final_obs if reply.final_obs is None else reply.final_obs
        self._recorder.end(ends, reply.final_value_M, final_obs)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of sampler and noise, between fragments only.

        If the env can be resumed exactly, also of env and pending observation.
        """
        assert self.ticket is None, "a group can be saved between its fragments only"
        if self.obs is None:
            self.obs = self._reset()
        state: dict[str, Any] = {
            "num_envs": self.env.num_envs,
            "sampler": self.sampler.state_dict(),
            "noise_drawn": self._drawn,
        }
        if isinstance(self.env, ExactResume):
            state["env"] = {key: tensor.clone() for key, tensor in self.env.state_dict().items()}
            state["obs"] = {key: tensor.to(CPU, copy=True) for key, tensor in self.obs.items()}
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
        if isinstance(self.env, ExactResume):
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
        return obs_to(self.env.reset(self.sampler), self.device)

    def _request(self) -> ActRequest:
        """Request the next decision, or after the last decision values alone."""
        assert self.obs is not None
        noise = None
        if self._t < self.decisions:
            noise = self.draw_noise()
        final_obs = None if self._ended is None else self._ended.final_obs
        return ActRequest(self.worker, self.group, self.obs, noise, final_obs)
