"""The part of a ``VecEnv`` that is the same for every simulator: chunks of actions, ends of episodes, statistics.

    action chunk [N, E, A] ─► for each control step: advance ─► rewards, failures, outcomes; count towards time limits
                             (an env that ends inside the chunk is not stepped further)
                           ─► final_obs of the ended rows ─► sampler.next ─► start those rows ─► obs, Timestep

A simulator is a subclass of ``EpisodicEnv`` with three methods: ``start`` begins episodes, ``advance`` makes one
control step, ``observe`` returns observations. Time limits, chunks and samplers are handled here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from embodied.core.contract import check_state
from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats, Ints
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.base.actions import checked_chunk
from embodied.envs.base.advance import Advance, mask_to_stepped, zero_diverged

__all__ = ["Advance", "EpisodicEnv"]


class EpisodicEnv(VecEnv):
    """A ``VecEnv`` made from the three methods of a simulator.

    num_envs: N. Not for use from several threads at once.
    """

    waiting_N: Tensor
    steps_left_N: Tensor
    """Control steps to the time limit of each env's present episode, int64 [N]."""

    def __init__(self, spec: EnvSpec, num_envs: int, device: torch.device | None = None) -> None:
        """device: of observations, rewards, outcomes and actions; None is the CPU. Statistics are on the CPU."""
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, allowed: 1 or more")
        self.spec, self.num_envs, self.device = spec, num_envs, device or CPU
        self.plans = EpisodePlans.empty(num_envs)
        self.waiting_N = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.steps_left_N = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._soonest = 0  # at most the smallest of steps_left_N: no time limit is reached in fewer control steps
        self._return_N = torch.zeros(num_envs, device=device)
        self._once = {name: torch.zeros_like(self.waiting_N) for name in spec.outcomes}
        self._no_obs: Obs | None = None  # observations of no env
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

    def steps_made_N(self) -> Ints:
        """Return the control steps of each env's present episode so far, [N]."""
        made_N: Ints = self.plans.time_limit_n - self.steps_left_N.cpu().numpy()
        return made_N

    def time_passed_N(self) -> Tensor:
        """Return the share of the time limit that has passed of each env's present episode, float32 [N]."""
        return 1 - self.steps_left_N / torch.from_numpy(self.plans.time_limit_n).to(self.device)

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
        rewards: list[Tensor] = []  # of each control step, [N]
        num_steps_N = torch.full_like(self.steps_left_N, num_actions)
        terminated_N = torch.zeros_like(self.waiting_N)
        latest = {name: torch.zeros_like(terminated_N) for name in self._once}
        broken: list[Tensor] = []
        early: list[tuple[Tensor, Obs]] = []  # ids and last observations of envs that ended before the last action
        alive_N = None  # all are
        if bool(self.waiting_N.any()):
            alive_N, num_steps_N[self.waiting_N] = ~self.waiting_N, 0
        for e in range(num_actions):
            ids = None if alive_N is None else alive_N.nonzero().squeeze(-1).cpu().numpy()
            if ids is not None and not len(ids):
                break
            result = self.advance(action_NEA.select(1, e), ids)
            if result.outcomes.keys() != self._once.keys():
                raise ValueError(f"advance: got outcomes {[*result.outcomes]}, the spec has {[*self._once]}")
            result, ended_N = self._count(result, alive_N, terminated_N, latest)
            if result.broken_n is not None:
                broken.append(result.broken_n)
            rewards.append(result.reward_N.clone() if num_actions > 1 else result.reward_N)
            if self.on_control_step is not None:
                self.on_control_step(self)
            if ended_N is not None:
                num_steps_N.masked_fill_(ended_N, e + 1)
                alive_N = ~ended_N if alive_N is None else alive_N & ~ended_N
                if e < num_actions - 1 and bool(alive_N.any()):  # the others go on
                    rows = ended_N.nonzero().squeeze(-1)
                    early.append((rows, self.observe(rows.cpu().numpy())))
        rewards += [torch.zeros_like(self._return_N)] * (num_actions - len(rewards))
        step = self._finish(torch.stack(rewards, -1), num_steps_N, latest, terminated_N, alive_N, early)
        for ids_n in broken:
            step.reward_NE[ids_n], step.num_steps_N[ids_n] = 0.0, 0
        return step

    # -- for subclasses that can be resumed exactly --------------------------------------------------------------------

    def episode_state(self) -> dict[str, Tensor]:
        """Return plans and counters of the present episodes, as a part of ``state_dict``."""
        return {
            **self.plans.state_dict(),
            "steps_left": self.steps_left_N.clone(),
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
        self._soonest = int(self.steps_left_N.min())
        self._return_N.copy_(state["return"])
        for name, outcome_N in self._once.items():
            outcome_N.copy_(state[f"once/{name}"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _count(
        self, result: Advance, alive_N: Tensor | None, terminated_N: Tensor, latest: dict[str, Tensor]
    ) -> tuple[Advance, Tensor | None]:
        """Count a control step of the envs ``alive_N`` (None: all).

        Write failures into ``terminated_N`` and outcomes into ``latest``. Return the result with zeros where nothing
        counts, and whose episodes end here, bool [N]; None: nobody's.
        """
        if alive_N is not None:
            result = mask_to_stepped(result, alive_N)
        ended_N = self._ends(result, alive_N, terminated_N)
        if result.broken_n is not None and len(result.broken_n):
            result = zero_diverged(result)
        for name, outcome_N in result.outcomes.items():
            latest[name] = outcome_N.clone() if alive_N is None else torch.where(alive_N, outcome_N, latest[name])
            self._once[name] |= outcome_N
        self._return_N += result.reward_N
        return result, ended_N

    def _ends(self, result: Advance, alive_N: Tensor | None, terminated_N: Tensor) -> Tensor | None:
        """Count towards the time limits, write failures into ``terminated_N``, and return whose episodes end here."""
        stepped: int | Tensor = 1 if alive_N is None else alive_N.long()
        self.steps_left_N -= stepped
        self._soonest -= 1
        failed_N, cut_N, broken_n = result.failed_N, result.truncated_N, result.broken_n
        if self._soonest > 0 and failed_N is None and cut_N is None and broken_n is None:
            return None
        ended_N = self.steps_left_N <= 0
        if cut_N is not None:
            ended_N |= cut_N
        if failed_N is not None:
            ended_N |= failed_N
            terminated_N |= failed_N
        if broken_n is not None:
            terminated_N[broken_n], ended_N[broken_n] = False, True
        if alive_N is not None:
            ended_N &= alive_N
        return ended_N if bool(ended_N.any()) else None

    def _finish(
        self,
        reward_NE: Tensor,
        num_steps_N: Tensor,
        latest: dict[str, Tensor],
        terminated_N: Tensor,
        alive_N: Tensor | None,
        early: list[tuple[Tensor, Obs]],
    ) -> Timestep:
        """Start the next episodes of envs that ended (if ``autoreset``) and return the timestep."""
        obs = self.observe()
        if self._no_obs is None:
            self._no_obs = {key: value[:0].clone() for key, value in obs.items()}
        ended, final_obs, episodes = self._nobody.env_id_M, dict(self._no_obs), self._nobody
        truncated_N = torch.zeros_like(terminated_N)
        ended_N = None if alive_N is None else ~(alive_N | self.waiting_N)
        if ended_N is not None and bool(ended_N.any()):
            truncated_N = ended_N & ~terminated_N
            ended = ended_N.nonzero().squeeze(-1)
            final_obs = {key: value.index_select(0, ended) for key, value in obs.items()}
            for rows, seen in early:
                for key, value in seen.items():
                    final_obs[key][torch.searchsorted(ended, rows)] = value
            if self.autoreset:
                episodes = self._renew(ended, latest, reward_NE.shape[1] - num_steps_N)
                for key, value in self.observe(ended.cpu().numpy()).items():
                    obs[key].index_copy_(0, ended, value)
            else:
                episodes = self._statistics(ended, latest)
                self.waiting_N |= ended_N
        return Timestep(
            obs=obs,
            reward_NE=reward_NE,
            terminated_N=terminated_N,
            truncated_N=truncated_N,
            num_steps_N=num_steps_N,
            final_ids=ended.to(self.device),
            final_obs=final_obs,
            episodes=episodes,
            info=latest,
        )

    def _renew(self, ended: Tensor, latest: dict[str, Tensor], unused_N: Tensor) -> EpisodeStats:
        """Begin the next episodes of envs ``ended`` [M], and return the statistics of those that ended.

        unused_N: actions of each env's chunk after an end. Their time passes too.
        """
        assert self.sampler is not None
        episodes = self._statistics(ended, latest)
        left_N = (self.steps_left_N - unused_N).clamp(min=0)
        self.begin(ended.cpu().numpy(), self.sampler.next(episodes, left_N.cpu()))
        return episodes

    def _statistics(self, ended: Tensor, latest: dict[str, Tensor]) -> EpisodeStats:
        """Return the statistics of the present episodes of envs ``ended`` [M]."""
        at_end = {name: outcome_N[ended].cpu() for name, outcome_N in latest.items()}
        once = {name: outcome_N[ended].cpu() for name, outcome_N in self._once.items()}
        ids, return_M, left_M = ended.cpu(), self._return_N[ended].cpu(), self.steps_left_N[ended].cpu()
        plans = self.plans.rows(ids.numpy())
        return EpisodeStats(ids, return_M, torch.from_numpy(plans.time_limit_n) - left_M, plans, once, at_end)

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
        self.steps_left_N.index_copy_(0, rows, torch.from_numpy(plans.time_limit_n).to(self.device))
        self._soonest = int(self.steps_left_N.min())
        for counted_N in (self.waiting_N, self._return_N, *self._once.values()):
            counted_N.index_fill_(0, rows, 0)
        self.start(ids, plans)
