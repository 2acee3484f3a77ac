"""The part of a ``VecEnv`` that is the same for every simulator: chunks of actions, ends of episodes, statistics.

    action chunk [N, E, A] ─► for each control step: advance ─► rewards, failures, outcomes; count towards time limits
                             (an env that ends inside the chunk is not stepped further)
                           ─► final_obs of the ended rows ─► sampler.next ─► start those rows ─► obs, Timestep

A simulator is a subclass of ``EpisodicEnv`` with three methods: ``start`` begins episodes, ``advance`` makes one
control step, ``observe`` returns observations. Time limits, chunks and samplers are handled here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats, Ints
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, Timestep
from envs.common.actions import checked_chunk


@dataclass(frozen=True, slots=True)
class Advance:
    """Result of one control step of all N envs; rows of envs that were not stepped are ignored."""

    reward_N: Tensor
    """Reward of the step, float32 [N]."""
    outcomes: Mapping[str, Tensor] = field(default_factory=dict)
    """Whether each of ``EnvSpec.outcomes`` is true of the new state, bool [N], by name."""
    failed_N: Tensor | None = None
    """Whether the episode ends here as a termination, bool [N]; None: no episode does."""
    broken_n: Tensor | None = None
    """Ids of envs whose simulation diverged, int64 [n]. Their episodes are truncated and their decisions count for
    nothing (``Timestep.num_steps_N`` is 0), because no episode has the state that they lead to."""
    truncated_N: Tensor | None = None
    """Whether the simulator itself cuts the episode here, bool [N]; None: it cuts none. If the episode also failed, it
    ends as a termination. Time limits of plans need nothing here."""


class EpisodicEnv(ABC):
    """A ``VecEnv`` (see embodied.core.protocols) made from the three methods of a simulator.

    num_envs: N. Not for use from several threads at once.
    """

    plans: EpisodePlans
    """Plan of the present episode of each env."""
    steps_left_N: Tensor
    """Control steps to the time limit of each env's present episode, int64 [N]."""

    def __init__(self, spec: EnvSpec, num_envs: int, device: torch.device | None = None) -> None:
        """device: of observations, rewards, outcomes and actions; None is the CPU. Statistics are on the CPU."""
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, allowed: 1 or more")
        self.spec, self.num_envs, self.device = spec, num_envs, device or torch.device("cpu")
        self.plans = EpisodePlans.empty(num_envs)
        self.on_control_step: Callable[[Any], None] | None = None  # called after every control step, for videos
        self.sampler: EpisodeSampler | None = None
        self.autoreset = True  # if False, an env whose episode ended keeps its last state until ``begin``
        self.waiting_N = torch.zeros(num_envs, dtype=torch.bool, device=device)  # not stepped until ``begin``
        self.steps_left_N = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._length_N = torch.zeros_like(self.steps_left_N)
        self._return_N = torch.zeros(num_envs, device=device)
        self._once = {name: torch.zeros_like(self.waiting_N) for name in spec.outcomes}
        none = torch.zeros(0, dtype=torch.int64)
        self._nobody = self._statistics(none, self._once)  # of a step in which no episode ends

    # -- methods of a simulator ----------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        """Begin an episode in each of envs ``ids`` [n] according to the n ``plans``, whatever state the env is in."""

    @abstractmethod
    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        """Make one control step of envs ``ids`` (None: all).

        The episodes of other envs have ended, and nothing of them is read before ``start``: a simulator that can only
        step all envs may step them too. action_NA: float32 [N, A] in [-1, 1], or int64 [N, A] for choices.
        """

    @abstractmethod
    def observe(self, ids: Ints | None = None) -> Obs:
        """Return the present observation of envs ``ids`` (None: all), new tensors with one row per env."""

    # -- VecEnv ------------------------------------------------------------------------------------------------------

    def reset(self, sampler: EpisodeSampler) -> Obs:
        """Start an episode in every env. ``sampler`` draws its plan, and the plans of all later episodes."""
        if sampler.num_envs != self.num_envs:
            raise ValueError(f"sampler: got one for {sampler.num_envs} envs, needed one for {self.num_envs}")
        self.sampler = sampler
        self.begin(np.arange(self.num_envs), sampler.start())
        return self.observe()

    def step(self, action: Tensor) -> Timestep:
        """Execute a chunk [N, E, A], or one action [N, A].

        Values beyond the limits of a ``Box`` are clipped. ValueError before the first ``reset``, for a wrong shape, and
        for a value that is not finite or not a choice; the envs are then not stepped.
        """
        if self.sampler is None:
            raise ValueError("step before the first reset: call reset(sampler) first")
        action_NEA = checked_chunk(torch.as_tensor(action, device=self.device), self.spec.action, self.num_envs)
        num_actions = action_NEA.shape[1]
        reward_NE = torch.zeros(self.num_envs, num_actions, device=self.device)
        num_steps_N = torch.zeros_like(self.steps_left_N)
        alive_N = ~self.waiting_N
        terminated_N = torch.zeros_like(alive_N)
        latest = {name: torch.zeros_like(alive_N) for name in self.spec.outcomes}
        broken: list[Tensor] = []
        early: list[tuple[Tensor, Obs]] = []  # ids and last observations of envs that ended before the last action
        for e in range(num_actions if bool(alive_N.any()) else 0):
            ids = None if bool(alive_N.all()) else alive_N.nonzero().squeeze(-1).cpu().numpy()
            result = self.advance(action_NEA[:, e], ids)
            if result.outcomes.keys() != self._once.keys():
                raise ValueError(f"advance: got outcomes {[*result.outcomes]}, the spec has {[*self._once]}")
            if ids is not None:
                result = _only(result, alive_N)
            ended_N = self.steps_left_N <= 1
            if result.truncated_N is not None:
                ended_N |= result.truncated_N
            if result.failed_N is not None:
                terminated_N |= result.failed_N
            if result.broken_n is not None and len(result.broken_n):
                terminated_N[result.broken_n], ended_N[result.broken_n] = False, True
                broken.append(result.broken_n)
                result = _without_results(result)
            for name in self.spec.outcomes:
                outcome_N = result.outcomes[name]
                latest[name] = outcome_N.clone() if ids is None else torch.where(alive_N, outcome_N, latest[name])
                self._once[name] |= outcome_N
            reward_NE[:, e] = result.reward_N
            num_steps_N += alive_N
            self._return_N += result.reward_N
            self._length_N += alive_N
            self.steps_left_N -= 1 if ids is None else alive_N.long()
            ended_N = (ended_N | terminated_N) & alive_N
            if self.on_control_step is not None:
                self.on_control_step(self)
            if bool(ended_N.any()):
                alive_N = alive_N & ~ended_N
                if not bool(alive_N.any()):
                    break
                if e < num_actions - 1:  # the others go on
                    rows = ended_N.nonzero().squeeze(-1)
                    early.append((rows, self.observe(rows.cpu().numpy())))
        step = self._finish(reward_NE, num_steps_N, latest, terminated_N, ~alive_N & ~self.waiting_N, early)
        for ids_n in broken:
            step.reward_NE[ids_n], step.num_steps_N[ids_n] = 0.0, 0
        return step

    @property
    def instruction_texts(self) -> Sequence[str]:
        """Text of the instruction of every env's present episode."""
        return [self.spec.instructions[i].text for i in self.plans.instruction_n.tolist()]

    def close(self) -> None:  # noqa: B027 (most simulators hold nothing that must be released)
        """Release what the simulator holds."""

    # -- for subclasses that can be resumed exactly --------------------------------------------------------------------

    def episode_state(self) -> dict[str, Tensor]:
        """Return plans and counters of the present episodes, as a part of ``state_dict``."""
        return {
            **self.plans.state_dict(),
            "steps_left": self.steps_left_N.clone(),
            "length": self._length_N.clone(),
            "return": self._return_N.clone(),
            **{f"once/{name}": outcome_N.clone() for name, outcome_N in self._once.items()},
        }

    def load_episode_state(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        """Continue from ``episode_state``, whose entries ``state`` contains; ``sampler`` has its state already.

        ValueError for a state of another number of envs or other outcomes.
        """
        check_state(state, self.episode_state())
        self.sampler = sampler
        self.plans = EpisodePlans.from_state_dict(state)
        self.steps_left_N.copy_(state["steps_left"])
        self._length_N.copy_(state["length"])
        self._return_N.copy_(state["return"])
        for name, outcome_N in self._once.items():
            outcome_N.copy_(state[f"once/{name}"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _finish(
        self,
        reward_NE: Tensor,
        num_steps_N: Tensor,
        latest: dict[str, Tensor],
        terminated_N: Tensor,
        ended_N: Tensor,
        early: list[tuple[Tensor, Obs]],
    ) -> Timestep:
        """Start the next episodes of envs that ended (if ``autoreset``) and return the timestep."""
        obs, ended, episodes = self.observe(), self._nobody.env_id_M.to(self.device), self._nobody
        final_obs = {key: value[:0] for key, value in obs.items()}
        if bool(ended_N.any()):
            ended = ended_N.nonzero().squeeze(-1)
            final_obs = {key: value[ended] for key, value in obs.items()}
            for rows, seen in early:
                for key, value in seen.items():
                    final_obs[key][torch.searchsorted(ended, rows)] = value
            episodes = self._statistics(ended, latest)
            if not self.autoreset:
                self.waiting_N |= ended_N
        if len(ended) and self.autoreset:
            unused_N = reward_NE.shape[1] - num_steps_N  # actions after an end: their time passes too
            left_N = (self.steps_left_N - unused_N).clamp(min=0)
            assert self.sampler is not None
            ids = ended.cpu().numpy()
            self.begin(ids, self.sampler.next(episodes, left_N.cpu()))
            for key, value in self.observe(ids).items():
                obs[key][ended] = value
        return Timestep(
            obs=obs,
            reward_NE=reward_NE,
            terminated_N=terminated_N,
            truncated_N=ended_N & ~terminated_N,
            num_steps_N=num_steps_N,
            final_ids=ended,
            final_obs=final_obs,
            episodes=episodes,
            info=latest,
        )

    def _statistics(self, ended: Tensor, latest: dict[str, Tensor]) -> EpisodeStats:
        """Return the statistics of the present episodes of envs ``ended`` [M]."""
        at_end = {name: outcome_N[ended].cpu() for name, outcome_N in latest.items()}
        once = {name: outcome_N[ended].cpu() for name, outcome_N in self._once.items()}
        return_M, length_M, ids = self._return_N[ended].cpu(), self._length_N[ended].cpu(), ended.cpu()
        return EpisodeStats(ids, return_M, length_M, self.plans.rows(ids.numpy()), once, at_end)

    def begin(self, ids: Ints, plans: EpisodePlans) -> None:
        """Start episodes with these plans in envs ``ids`` [n]; others go on. ValueError for plans beyond the spec."""
        bounds = {
            "stage_n": (0, len(self.spec.stages)),
            "instruction_n": (0, max(len(self.spec.instructions) - 1, 0)),
            "time_limit_n": (1, self.spec.max_episode_steps),
        }
        for name, (low, high) in bounds.items():
            found_n = getattr(plans, name)
            if len(plans) != len(ids) or found_n.min() < low or found_n.max() > high:
                raise ValueError(
                    f"sampler: drew {name} {found_n[:5].tolist()} for {len(ids)} envs, allowed: {low} to {high} each"
                )
        rows = torch.from_numpy(ids).to(self.device)
        self.plans.put(ids, plans)
        self.steps_left_N[rows] = torch.from_numpy(plans.time_limit_n).to(self.device)
        self.waiting_N[rows] = False
        self._length_N[rows] = 0
        self._return_N[rows] = 0
        for outcome_N in self._once.values():
            outcome_N[rows] = False
        self.start(ids, plans)


def _only(result: Advance, alive_N: Tensor) -> Advance:
    """Return a result in which only envs that were stepped have rewards, outcomes and ends."""
    return Advance(
        torch.where(alive_N, result.reward_N, 0.0),
        {name: outcome_N & alive_N for name, outcome_N in result.outcomes.items()},
        None if result.failed_N is None else result.failed_N & alive_N,
        None if result.broken_n is None else result.broken_n[alive_N[result.broken_n]],
        None if result.truncated_N is None else result.truncated_N & alive_N,
    )


def _without_results(result: Advance) -> Advance:
    """Return a result in which broken envs have neither reward nor outcome: their state is not of the episode."""
    whole_N = torch.ones_like(result.reward_N, dtype=torch.bool)
    whole_N[result.broken_n] = False
    outcomes = {name: outcome_N & whole_N for name, outcome_N in result.outcomes.items()}
    return replace(result, reward_N=torch.where(whole_N, result.reward_N, 0.0), outcomes=outcomes)
