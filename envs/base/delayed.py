"""Inference that takes time: while the policy computes a chunk, the robot executes what is left of the one before.

    decision    t                          t + E                      t + 2E         control steps; E = ``execute``
    inference   |--- d ---|                |--- d' ---|               |-- ...
    executed    prefix    | rows d .. E-1  | prefix    | rows d' ..   | ...
                rows E .. of the           rows E .. E+d'-1 of
                chunk before               this chunk

A decision observes the env at its start, ``prefix`` (the d actions that the robot executes meanwhile) and ``delay``
(d). The first d rows of its chunk are not executed: the prefix is. At the first decision of an episode the robot waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats, Ints
from embodied.core.protocols import Demonstrating, ExactResume, Filmed, VecEnv, Watchable
from embodied.core.spec import Box
from embodied.core.types import Obs, Timestep
from embodied.envs.episodes.seeding import EpisodeRng

STATE = "delayed/"  # prefix of the wrapper's own keys in the state


class DelayedEnv:
    """A ``VecEnv`` around another one, whose decisions take effect after a delay; see ``protocols.Delayed``.

    execute: E, control steps between two decisions. max_delay: D, rows of the observed prefix. delay: d of all
    decisions but an episode's first; None draws it uniformly from 0 to D, as a function of the episode's plan and the
    number of the decision. ``step`` takes chunks of any length; beyond its end a chunk repeats its last action.
    """

    def __init__(self, env: VecEnv, execute: int, max_delay: int, delay: int | None = None) -> None:
        assert 0 < max_delay <= execute, f"a delay of {max_delay} control steps between decisions {execute} apart"
        assert delay is None or 0 <= delay <= max_delay
        self.env, self.spec, self.num_envs, self.device = env, env.spec, env.num_envs, env.device
        self.execute, self.max_delay, self.delay = execute, max_delay, delay
        dtype = torch.float32 if isinstance(env.spec.action, Box) else torch.int64
        shape = (env.num_envs, max_delay, env.spec.action_dim)
        self._prefix_NDA = torch.zeros(shape, dtype=dtype, device=env.device)
        self._delay_N = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._decision_N = np.zeros(env.num_envs, dtype=np.int64)
        self._sampler: _Listening | None = None

    def reset(self, sampler: EpisodeSampler) -> Obs:
        """Start an episode in every env, without a prefix."""
        self._sampler = _Listening(sampler)
        self._prefix_NDA.zero_()
        self._delay_N.zero_()
        self._decision_N[:] = 0
        return self._observed(self.env.reset(self._sampler))

    def step(self, action: Tensor) -> Timestep:
        """Execute the prefix, then the chunk [N, H, A] from row d on, E control steps together.

        ValueError for a wrong shape and for values that are not finite; nothing is executed then.
        """
        chunk_NCA = self._committed(action)
        step = self.env.step(chunk_NCA[:, : self.execute])
        rows = step.num_steps_N[:, None] + torch.arange(self.max_delay, device=self.device)
        rows = rows.clamp(max=chunk_NCA.shape[1] - 1)
        left_NDA = chunk_NCA.gather(1, rows[..., None].expand(-1, -1, chunk_NCA.shape[2]))
        self._decision_N += 1
        ended_M = step.final_ids.cpu().numpy()
        final_delay_M = self._drawn(step.episodes.plans, self._decision_N[ended_M])
        final = {"prefix": _masked(left_NDA[step.final_ids], final_delay_M), "delay": final_delay_M}
        self._decision_N[ended_M] = 0
        assert self._sampler is not None
        self._delay_N = self._drawn(self._sampler.present, self._decision_N)
        self._prefix_NDA = _masked(left_NDA, self._delay_N)
        return replace(step, obs=self._observed(step.obs), final_obs={**step.final_obs, **final})

    def close(self) -> None:
        """Close the wrapped env."""
        self.env.close()

    def _committed(self, action: Tensor) -> Tensor:
        """Return the actions that the robot will execute if it gets no others, [N, max(H, E), A].

        ValueError as in ``step``.
        """
        if self._sampler is None:
            raise ValueError("step before the first reset: call reset(sampler) first")
        num, _, action_dim = self._prefix_NDA.shape
        if action.ndim != 3 or (action.shape[0], action.shape[2]) != (num, action_dim) or not action.shape[1]:
            raise ValueError(f"action: got shape {tuple(action.shape)}, needed [{num}, H, {action_dim}] with H >= 1")
        if not bool(torch.isfinite(action).all()):
            raise ValueError("action: NaN or infinite; nothing was executed")
        length = max(action.shape[1], self.execute)
        rows = torch.arange(length, device=self.device).clamp(max=action.shape[1] - 1)
        chunk_NCA = action[:, rows]
        if isinstance(self.spec.action, Box):
            chunk_NCA = chunk_NCA.float().clamp(-1, 1)
        given_ND1 = (torch.arange(self.max_delay, device=self.device) < self._delay_N[:, None]).unsqueeze(-1)
        chunk_NCA[:, : self.max_delay] = torch.where(given_ND1, self._prefix_NDA, chunk_NCA[:, : self.max_delay])
        return chunk_NCA

    def _drawn(self, plans: EpisodePlans, decision_n: Ints) -> Tensor:
        """Return the delays of decisions ``decision_n`` (0 is an episode's first) of episodes ``plans``, int64 [n]."""
        if self.delay is None:
            uniform_n = EpisodeRng(plans.seed_n, plans.number_n).numbers("delay", decision_n)
            delay_n = (uniform_n * (self.max_delay + 1)).astype(np.int64)
        else:
            delay_n = np.full(len(decision_n), self.delay, dtype=np.int64)
        return torch.from_numpy(np.where(decision_n > 0, delay_n, 0)).to(self.device)

    def _observed(self, obs: Obs) -> Obs:
        """Add prefix and delay to the observations of all envs."""
        return {**obs, "prefix": self._prefix_NDA.clone(), "delay": self._delay_N.clone()}


def _masked(left_nDA: Tensor, delay_n: Tensor) -> Tensor:
    """Return the prefixes: the first ``delay`` rows of what is left of the chunks, then zeros."""
    later = torch.arange(left_nDA.shape[1], device=delay_n.device) >= delay_n[:, None]
    return left_nDA.masked_fill(later.unsqueeze(-1), 0)


class _Listening:
    """An episode sampler that remembers the plans of the present episodes."""

    def __init__(self, sampler: EpisodeSampler, present: EpisodePlans | None = None) -> None:
        self.sampler, self.num_envs = sampler, sampler.num_envs
        self.present = EpisodePlans.empty(sampler.num_envs) if present is None else present

    def start(self) -> EpisodePlans:
        plans = self.sampler.start()
        self.present = EpisodePlans.concatenate([plans])  # a copy
        return plans

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        plans = self.sampler.next(ended, steps_left_N)
        self.present.put(ended.env_id_M.numpy(), plans)
        return plans

    def state_dict(self) -> dict[str, Tensor]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sampler.load_state_dict(state)


# -- capabilities of the wrapped env -----------------------------------------------------------------------------------
class _Resuming(DelayedEnv):
    """Add ``ExactResume``."""

    env: ExactResume

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the wrapped env, prefixes, delays, numbers of the decisions, and plans."""
        return {**self.env.state_dict(), **self._own_state()}

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        """Continue exactly. ValueError if the state does not fit."""
        check_state(state, self._own_state())
        own = {key.removeprefix(STATE): value for key, value in state.items() if key.startswith(STATE)}
        self._sampler = _Listening(sampler, EpisodePlans.from_state_dict(own))
        self.env.load_state_dict(state, self._sampler)
        self._prefix_NDA.copy_(own["prefix"])
        self._delay_N.copy_(own["delay"])
        self._decision_N[:] = own["decision"].numpy()

    def _own_state(self) -> dict[str, Tensor]:
        plans = EpisodePlans.empty(self.num_envs) if self._sampler is None else self._sampler.present
        decision = torch.from_numpy(self._decision_N.copy())
        own = {"prefix": self._prefix_NDA.clone(), "delay": self._delay_N.clone(), "decision": decision}
        return {STATE + key: value for key, value in {**own, **plans.state_dict()}.items()}


class _Watched(DelayedEnv):
    """Add ``Watchable``; the callback gets the wrapped env."""

    env: Watchable

    @property
    def on_control_step(self) -> Callable[[Any], None] | None:
        return self.env.on_control_step

    @on_control_step.setter
    def on_control_step(self, callback: Callable[[Any], None] | None) -> None:
        self.env.on_control_step = callback


class _Filming(_Watched):
    """Add ``Filmed``."""

    env: Filmed

    @property
    def instruction_texts(self) -> Sequence[str]:
        return self.env.instruction_texts

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        return self.env.film(width, height)


class _Demonstrated(DelayedEnv):
    """Add ``Demonstrating``."""

    env: Demonstrating

    def expert(self) -> Tensor:
        return self.env.expert()


CAPABILITIES: dict[type, type[DelayedEnv]] = {
    ExactResume: _Resuming, Filmed: _Filming, Watchable: _Watched, Demonstrating: _Demonstrated,
}  # fmt: skip


def delayed(env: VecEnv, execute: int, max_delay: int, delay: int | None = None) -> DelayedEnv:
    """Return ``env`` with delays (see ``DelayedEnv``) and with those of CAPABILITIES that ``env`` has."""
    bases = [base for capability, base in CAPABILITIES.items() if isinstance(env, capability)]
    kind = type("DelayedEnv", (*bases, DelayedEnv), {})
    return cast(DelayedEnv, kind(env, execute, max_delay, delay))
