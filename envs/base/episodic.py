"""The part of a ``VecEnv`` that is the same for every simulator: chunks of actions, ends of episodes, statistics.

    action chunk [N, E, A] ─► for each control step: advance ─► rewards, failures, outcomes; count towards time limits
                             (an env that ends inside the chunk is not stepped further)
                           ─► final_obs of the ended rows ─► sampler.next ─► start those rows ─► obs, Timestep

A simulator is a subclass of ``EpisodicEnv`` with three methods: ``start`` begins episodes, ``advance`` makes one
control step, ``observe`` returns observations. Time limits, chunks and samplers are handled here.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats, Ints
from embodied.core.spec import SUCCESS, EnvSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.base.actions import checked_chunk

WHOLE_EVERY = 8  # env seeds: a critic learns from whole episodes what staying solved is worth


@dataclass(frozen=True, slots=True)
class Advance:
    """Result of one control step of all N envs; rows of envs that were not stepped are ignored."""

    reward_N: Tensor
    """Reward of the step, float32 [N]."""
    outcomes: Mapping[str, Tensor] = field(default_factory=dict)
    """Whether each of ``EnvSpec.outcomes`` is true of the new state, bool [N], by name."""
    failed_N: Tensor | None = None
    """Whether the episode ends here as a termination, bool [N]; None: no episode does."""
    broken_N: Tensor | None = None
    """Whether the simulation diverged, bool [N]; None: none did. The episode is truncated and the decision counts for
    nothing (``Timestep.num_steps_N`` is 0), because the state after a divergence means nothing."""
    truncated_N: Tensor | None = None
    """Whether the simulator itself cuts the episode here, bool [N]; None: it cuts none. If the episode also failed, it
    ends as a termination. The time limits of plans are counted by EpisodicEnv."""


class Chunks:
    """The chunks that N envs execute, and their results so far: the fields of ``Timestep``."""

    def __init__(self, action_NEA: Tensor, outcomes: Mapping[str, Tensor]) -> None:
        """outcomes: bool [N] by name, for their shapes."""
        num, length, _ = action_NEA.shape
        self.action_NEA = action_NEA
        self.reward_NE = torch.zeros(num, length, device=action_NEA.device)
        self.num_steps_N = torch.zeros(num, dtype=torch.int64, device=action_NEA.device)
        no_N = torch.zeros(num, dtype=torch.bool, device=action_NEA.device)
        self.ended_N, self.terminated_N, self.broken_N = no_N, no_N.clone(), no_N.clone()
        self.info = {name: torch.zeros_like(no_N) for name in outcomes}


class EpisodicEnv(VecEnv):
    """A ``VecEnv`` of N envs, made from the three methods of a simulator. Not for several threads at once."""

    sampler: EpisodeSampler | None = None
    """Draws the plans of the next episodes; None before ``reset``."""
    waiting_N: Tensor
    steps_left_N: Tensor
    """Control steps to the time limit of each env's present episode, int64 [N]."""
    ended_stay = False
    """Whether an env that is not stepped has the same observation until ``start``."""

    def __init__(self, spec: EnvSpec, num_envs: int, device: torch.device | None = None) -> None:
        """device: of observations, rewards, outcomes and actions; None is the CPU. Statistics are on the CPU."""
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, allowed: 1 or more")
        self.spec, self.num_envs, self.device = spec, num_envs, device or CPU
        self.plans = EpisodePlans.empty(num_envs)
        self.waiting_N = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.steps_left_N = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._succeeding_N = torch.zeros_like(self.steps_left_N)  # control steps of success in a row
        self._may_cut_N = torch.zeros_like(self.waiting_N)
        self._soonest = 0  # no time limit is reached in fewer control steps, so that nobody waits for a GPU's answer
        self._return_N = torch.zeros(num_envs, device=device)
        self._once = {name: torch.zeros_like(self.waiting_N) for name in spec.outcomes}
        self._final: Obs = {}  # last observation of each env's latest episode, [N, ...]
        self._nobody = self._statistics(torch.zeros(0, dtype=torch.int64), self._once)

    @abstractmethod
    def start(self, ids: Ints, plans: EpisodePlans) -> None:
        """Begin an episode in each of envs ``ids`` [n] according to the n ``plans``, whatever state the env is in."""

    @abstractmethod
    def advance(self, action_NA: Tensor, ids: Ints | None) -> Advance:
        """Make one control step of envs ``ids`` (None: all).

        The episodes of other envs have ended; their results are ignored until ``start``. So a simulator that can only
        step all envs may step them too. action_NA: float32 [N, A] in [-1, 1], or int64 [N, A] for choices.
        """

    @abstractmethod
    def observe(self, ids: Ints | None = None) -> Obs:
        """Return the present observation of envs ``ids`` (None: all), new tensors with one row per env."""

    def rows_of(self, arrays: Mapping[str, NDArray[Any]], ids: Ints | None) -> Obs:
        """Return the observations of envs ``ids`` (None: all) from arrays of N rows.

        Without a state they get the share of the time limit that has passed, with cameras the instructions.
        """
        rows = slice(None) if ids is None else ids
        obs = {key: torch.from_numpy(array[rows].copy()) for key, array in arrays.items()}
        if "state" not in obs:
            obs["state"] = (1 - self.steps_left_N / torch.from_numpy(self.plans.time_limit_n))[rows, None]
        if self.spec.cameras:
            obs["instruction"] = torch.from_numpy(self.plans.instruction_n[rows].copy())
        return obs

    def steps_made_N(self) -> Ints:
        """Return the control steps of each env's present episode so far, [N]."""
        made_N: Ints = self.plans.time_limit_n - self.steps_left_N.cpu().numpy()
        return made_N

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
        chunks = Chunks(action_NEA, self._once)
        self.run_chunks(chunks)
        ended, episodes = chunks.ended_N.nonzero().squeeze(-1), self._nobody
        if len(ended) and self.autoreset:
            episodes = self._renew(ended, chunks)
        elif len(ended):
            episodes = self._statistics(ended, chunks.info)
            self.waiting_N |= chunks.ended_N
        return self._timestep(chunks, episodes)

    def run_chunks(self, chunks: Chunks) -> None:
        """Execute chunks control step by control step, and keep their results and the last observations."""
        action_NEA = chunks.action_NEA
        alive_N, ids = ~self.waiting_N, None  # None: all
        if bool(self.waiting_N.any()):
            ids = alive_N.nonzero().squeeze(-1).cpu().numpy()
        for e in range(action_NEA.shape[1]):
            if ids is not None and not len(ids):
                break
            result = self.advance(action_NEA.select(1, e), ids)
            chunks.reward_NE[:, e], ended_N = self._count(chunks, result, alive_N)
            self.check_rewards(chunks.reward_NE[:, e])
            if self.on_control_step is not None:
                self.on_control_step(self)
            if self._may_end(result) and bool(ended_N.any()):
                if not self.ended_stay:
                    self._keep_final(ended_N)
                alive_N &= ~ended_N
                ids = alive_N.nonzero().squeeze(-1).cpu().numpy()
        if self.ended_stay and bool(chunks.ended_N.any()):
            self._keep_final(chunks.ended_N)

    def episode_state(self) -> dict[str, Tensor]:
        """Return plans and counters of the present episodes, as a part of ``state_dict``."""
        return {
            **self.plans.state_dict(),
            "steps_left": self.steps_left_N.clone(),
            "return": self._return_N.clone(),
            **({"succeeding": self._succeeding_N.clone()} if self.cut_after_success else {}),
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
        self._note_plans()
        self._return_N.copy_(state["return"])
        if self.cut_after_success:
            self._succeeding_N.copy_(state["succeeding"])
        for name, outcome_N in self._once.items():
            outcome_N.copy_(state[f"once/{name}"])

    def begin(self, ids: Ints, plans: EpisodePlans) -> None:
        bounds = {
            "stage_n": (0, len(self.spec.stages)),
            "instruction_n": (0, max(len(self.spec.instructions) - 1, 0)),
            "time_limit_n": (1, self.spec.max_episode_steps),
        }
        for name, (low, high) in bounds.items():
            found_n = getattr(plans, name)
            if len(plans) != len(ids) or found_n.min() < low or found_n.max() > high:
                got = f"{name} {found_n[:5].tolist()} for {len(ids)} envs"
                raise ValueError(f"sampler: drew {got}, allowed: {low} to {high} each")
        rows = torch.from_numpy(ids).to(self.device)
        self.plans.put(ids, plans)
        self.steps_left_N.index_copy_(0, rows, torch.from_numpy(plans.time_limit_n).to(self.device))
        self._note_plans()
        for counted_N in (self.waiting_N, self._return_N, self._succeeding_N, *self._once.values()):
            counted_N.index_fill_(0, rows, 0)
        self.start(ids, plans)

    def _note_plans(self) -> None:
        """Keep what follows from the plans of the present episodes."""
        self._soonest = int(self.steps_left_N.min())
        self._may_cut_N.copy_(torch.from_numpy(self.plans.seed_n % WHOLE_EVERY != 0))

    def check_rewards(self, reward_N: Tensor) -> None:
        """Refuse rewards of a control step, 0 where none counts. A simulator that knows what made them says so."""

    def _may_end(self, result: Advance) -> bool:
        """Return whether an episode may have ended in a control step, without waiting for a device."""
        self._soonest -= 1
        causes = (result.failed_N, result.truncated_N, result.broken_N)
        return self._soonest <= 0 or self.cut_after_success > 0 or any(cause_N is not None for cause_N in causes)

    def _count(self, chunks: Chunks, result: Advance, stepped_N: Tensor) -> tuple[Tensor, Tensor]:
        """Count a control step of envs ``stepped_N``; return rewards and ends, [N].

        It never waits for a device, and what it changes keeps its address, so that its kernels can be recorded.
        """
        if result.outcomes.keys() != self._once.keys():
            raise ValueError(f"advance: got outcomes {[*result.outcomes]}, the spec has {[*self._once]}")
        counted_N = stepped_N
        if result.broken_N is not None:  # a diverged state has neither reward nor outcome
            counted_N = stepped_N & ~result.broken_N
            chunks.broken_N |= stepped_N & result.broken_N
        reward_N = torch.where(counted_N, result.reward_N, 0.0)
        for name, outcome_N in result.outcomes.items():
            held_N, latest_N = outcome_N & counted_N, chunks.info[name]
            latest_N.copy_(torch.where(stepped_N, held_N, latest_N))
            self._once[name] |= held_N
        self._return_N += reward_N
        chunks.num_steps_N += stepped_N
        self.steps_left_N -= stepped_N.long()
        ended_N = self.steps_left_N <= 0
        cut_N = self._cut_N(result.outcomes, stepped_N)
        for cause_N in (result.failed_N, result.truncated_N, result.broken_N, cut_N):
            if cause_N is not None:
                ended_N |= cause_N
        ended_N &= stepped_N
        if result.failed_N is not None:
            chunks.terminated_N |= result.failed_N & counted_N
        chunks.ended_N |= ended_N
        return reward_N, ended_N

    def _cut_N(self, outcomes: Mapping[str, Tensor], stepped_N: Tensor) -> Tensor | None:
        """Count a control step of success of envs ``stepped_N``.

        Return whether ``cut_after_success`` cuts each episode, None if it never does.
        """
        if not self.cut_after_success or SUCCESS not in outcomes:
            return None
        row_N = (self._succeeding_N + 1) * outcomes[SUCCESS]
        self._succeeding_N.copy_(torch.where(stepped_N, row_N, self._succeeding_N))
        return self._may_cut_N & (self._succeeding_N >= self.cut_after_success)

    def _keep_final(self, ended_N: Tensor) -> None:
        rows = ended_N.nonzero().squeeze(-1)
        for key, value in self.observe(rows.cpu().numpy()).items():
            if key not in self._final:
                self._final[key] = value.new_empty(self.num_envs, *value.shape[1:])
            self._final[key].index_copy_(0, rows, value)

    def _renew(self, ended: Tensor, chunks: Chunks) -> EpisodeStats:
        """Begin the next episodes of envs ``ended`` [M], and return the statistics of those that ended."""
        assert self.sampler is not None
        episodes = self._statistics(ended, chunks.info)
        unused_N = chunks.reward_NE.shape[1] - chunks.num_steps_N  # actions after the end: the sampler counts them
        plans = self.sampler.next(episodes, (self.steps_left_N - unused_N).clamp(min=0).cpu())
        self.begin(ended.cpu().numpy(), plans)
        return episodes

    def _statistics(self, ended: Tensor, latest: Mapping[str, Tensor]) -> EpisodeStats:
        at_end = {name: outcome_N[ended].cpu() for name, outcome_N in latest.items()}
        once = {name: outcome_N[ended].cpu() for name, outcome_N in self._once.items()}
        ids, return_M, left_M = ended.cpu(), self._return_N[ended].cpu(), self.steps_left_N[ended].cpu()
        plans = self.plans.rows(ids.numpy())
        return EpisodeStats(ids, return_M, torch.from_numpy(plans.time_limit_n) - left_M, plans, once, at_end)

    def _timestep(self, chunks: Chunks, episodes: EpisodeStats, rows: Tensor | None = None) -> Timestep:
        chunks.reward_NE.masked_fill_(chunks.broken_N.unsqueeze(-1), 0.0)
        chunks.num_steps_N.masked_fill_(chunks.broken_N, 0)
        obs = self.observe(None if rows is None else rows.numpy())
        at = slice(None) if rows is None else rows
        ended_n, terminated_n = chunks.ended_N[at], chunks.terminated_N[at]
        final_ids = ended_n.nonzero().squeeze(-1)
        final = final_ids if rows is None else rows[final_ids]
        return Timestep(
            obs=obs,
            reward_NE=chunks.reward_NE[at],
            terminated_N=terminated_n,
            truncated_N=ended_n & ~terminated_n,
            num_steps_N=chunks.num_steps_N[at],
            final_ids=final_ids,
            final_obs={key: self._final[key][final] if len(final) else obs[key][:0].clone() for key in obs},
            episodes=episodes,
            info={name: outcome_N[at] for name, outcome_N in chunks.info.items()},
        )
