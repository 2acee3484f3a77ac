"""Inference that takes time: while the policy computes a chunk, the robot executes what is left of the one before.

    decision    t                          t + E                      t + 2E         control steps; E = ``execute``
    inference   |--- d ---|                |--- d' ---|               |-- ...
    executed    prefix    | rows d .. E-1  | prefix    | rows d' ..   | ...
                rows E .. of the           rows E .. E+d'-1 of
                chunk before               this chunk

A decision observes the env at its start, ``prefix`` (the d actions that the robot executes meanwhile) and ``delay``
(d). The first d rows of its chunk are not executed: the prefix is. At the first decision of an episode the robot waits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.spec import Box
from embodied.core.types import Obs, Timestep
from embodied.envs.base.actions import checked_chunk
from embodied.envs.episodes.seeding import EpisodeRng


class DelayedEnv(VecEnv):
    """A ``VecEnv`` around another one, whose decisions take effect after a delay; see ``VecEnv.max_delay``.

    execute: E. max_delay: D, rows of the observed prefix. delay: d of all decisions but an episode's first; None draws
    it uniformly from 0 to D, as a function of plan and decision. Beyond its end a chunk repeats its last action.
    """

    def __init__(self, env: VecEnv, execute: int, max_delay: int, delay: int | None = None) -> None:
        assert 0 < max_delay <= execute, f"a delay of {max_delay} control steps between decisions {execute} apart"
        assert delay is None or 0 <= delay <= max_delay
        self.env, self.spec, self.num_envs, self.device = env, env.spec, env.num_envs, env.device
        self.film, self.film_quickly, self.expert = env.film, env.film_quickly, env.expert
        self.resumes_exactly = env.resumes_exactly
        self.execute, self.max_delay, self.delay = execute, max_delay, delay
        dtype = torch.float32 if isinstance(env.spec.action, Box) else torch.int64
        shape = (env.num_envs, max_delay, env.spec.action_dim)
        self._prefix_NDA = torch.zeros(shape, dtype=dtype, device=env.device)
        self._delay_N = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._decision_N = np.zeros(env.num_envs, dtype=np.int64)

    def reset(self, sampler: EpisodeSampler) -> Obs:
        self._prefix_NDA.zero_()
        self._delay_N.zero_()
        self._decision_N[:] = 0
        return self._observed(self.env.reset(sampler))

    def step(self, action: Tensor) -> Timestep:
        """Execute the prefix, then the chunk [N, H, A] from row d on, E control steps together."""
        given_NHA = checked_chunk(action, self.spec.action, self.num_envs).to(self._prefix_NDA.dtype)
        row_C = torch.arange(max(given_NHA.shape[1], self.execute + self.max_delay), device=self.device)
        chunk_NCA = given_NHA[:, row_C.clamp(max=given_NHA.shape[1] - 1)]  # executed if the robot gets no other actions
        head_NDA, late_ND = chunk_NCA[:, : self.max_delay], row_C[: self.max_delay] < self._delay_N[:, None]
        chunk_NCA[:, : self.max_delay] = torch.where(late_ND.unsqueeze(-1), self._prefix_NDA, head_NDA)
        step = self.env.step(chunk_NCA[:, : self.execute])
        rows = step.num_steps_N[:, None] + row_C[: self.max_delay]
        left_NDA = chunk_NCA.gather(1, rows[..., None].expand(-1, -1, chunk_NCA.shape[2]))
        self._decision_N += 1
        ended_M = step.final_ids.cpu().numpy()
        final_delay_M = self._drawn(step.episodes.plans, self._decision_N[ended_M])
        final = {"prefix": _masked(left_NDA[step.final_ids], final_delay_M), "delay": final_delay_M}
        self._decision_N[ended_M] = 0
        self._delay_N = self._drawn(self.env.plans, self._decision_N)
        self._prefix_NDA = _masked(left_NDA, self._delay_N)
        return replace(step, obs=self._observed(step.obs), final_obs={**step.final_obs, **final})

    def close(self) -> None:
        self.env.close()

    @property
    def instruction_texts(self) -> Sequence[str]:
        return self.env.instruction_texts

    @property
    def on_control_step(self) -> Callable[[Any], None] | None:
        return self.env.on_control_step

    @on_control_step.setter
    def on_control_step(self, callback: Callable[[Any], None] | None) -> None:
        self.env.on_control_step = callback

    def state_dict(self) -> dict[str, Tensor]:
        own = {"prefix": self._prefix_NDA, "delay": self._delay_N, "decision": torch.from_numpy(self._decision_N)}
        return {**self.env.state_dict(), **{f"delayed/{key}": value.clone() for key, value in own.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        check_state(state, {key: value for key, value in self.state_dict().items() if key.startswith("delayed/")})
        self.env.load_state_dict(state, sampler)
        self._prefix_NDA.copy_(state["delayed/prefix"])
        self._delay_N.copy_(state["delayed/delay"])
        self._decision_N[:] = state["delayed/decision"].numpy()

    def _drawn(self, plans: EpisodePlans, decision_n: Ints) -> Tensor:
        """Return the delays of decisions ``decision_n`` (0 is an episode's first) of episodes ``plans``, int64 [n]."""
        delay_n = np.full(len(decision_n), self.delay or 0, dtype=np.int64)
        if self.delay is None:
            uniform_n = EpisodeRng(plans.seed_n, plans.number_n).numbers("delay", decision_n)
            delay_n = (uniform_n * (self.max_delay + 1)).astype(np.int64)
        return torch.from_numpy(np.where(decision_n > 0, delay_n, 0)).to(self.device)

    def _observed(self, obs: Obs) -> Obs:
        return {**obs, "prefix": self._prefix_NDA.clone(), "delay": self._delay_N.clone()}


def _masked(left_nDA: Tensor, delay_n: Tensor) -> Tensor:
    """Return the prefixes: the first ``delay`` rows of what is left of the chunks, then zeros."""
    later = torch.arange(left_nDA.shape[1], device=delay_n.device) >= delay_n[:, None]
    return left_nDA.masked_fill(later.unsqueeze(-1), 0)
