"""The nouns that every part exchanges.

Shape suffixes: N envs, T decisions of a fragment, H planned and E executed actions of a chunk (E <= H), A action
size, K denoise steps. All tensors live on the CPU unless a part says otherwise; observations are dictionaries of
tensors whose leading dimensions are the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.core.episodes import EpisodeStats

Obs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Timestep:
    """Result of executing one chunk in N envs (SAME_STEP autoreset).

    obs: the observation to act on next; for an env that ended it is the first one of its new episode.
    reward_NE: reward of each executed control step, 0 after the episode's end.
    num_steps_N: control steps really executed (1..E): the discount of this decision is gamma ** num_steps.
    terminated_N, truncated_N: never both true for one env.
    final_ids: rows that ended; final_obs: their last observation, one row per entry of final_ids.
    info: for each of ``EnvSpec.outcomes``, whether it held after the last step that was executed, bool [N].
    """

    obs: Obs
    reward_NE: Tensor
    terminated_N: Tensor
    truncated_N: Tensor
    num_steps_N: Tensor
    final_ids: Tensor
    final_obs: Obs
    episodes: EpisodeStats
    info: dict[str, Tensor] = field(default_factory=dict)

    @property
    def reward_N(self) -> Tensor:
        """Undiscounted reward of the chunk, [N]."""
        return self.reward_NE.sum(-1)


@dataclass(frozen=True, slots=True)
class PolicySample:
    """One decision for N envs.

    action_NHA: the planned chunk in [-1, 1] units (unclipped). chain: what ``Policy.evaluate`` needs to give
    log_prob_N back: the K+1 denoise states [N, K+1, H, A] of a flow policy, the action [N, 1, H, A] of a Gaussian.
    version_N: int64, the weights that the actor really used (-1 until an actor stamps it).
    """

    action_NHA: Tensor
    log_prob_N: Tensor
    value_N: Tensor
    chain: Tensor
    version_N: Tensor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What ``Policy.evaluate`` returns for B decisions, all differentiable.

    log_prob_B: the exact log-probability. log_prob_BE: the share of each executed action in it (they sum to it);
    terms: how many scalar densities it is a sum of. A policy may leave these out (None): algorithms that ask for
    another reduction than the sum then refuse it.
    """

    log_prob_B: Tensor
    entropy_B: Tensor
    value_B: Tensor
    log_prob_BE: Tensor | None = None
    terms: int | None = None

    @classmethod
    def of(cls, log_prob_BE: Tensor, entropy_B: Tensor, value_B: Tensor, terms: int) -> Evaluation:
        """From the shares of the executed actions."""
        return cls(log_prob_BE.sum(-1), entropy_B, value_B, log_prob_BE, terms)


@dataclass(frozen=True, slots=True)
class Transitions:
    """B decisions with what they led to, as off-policy algorithms and replay buffers read them."""

    obs: Obs
    """What each decision was made on, [B, ...]."""
    action_BEA: Tensor
    """The executed actions; those after an episode's end were not executed."""
    reward_BE: Tensor
    """Reward of each executed control step, 0 after the episode's end."""
    num_steps_B: Tensor
    """int64, control steps really executed: the discount of ``next_obs`` is gamma ** num_steps."""
    terminated_B: Tensor
    """bool; nothing follows after ``next_obs``."""
    truncated_B: Tensor
    """bool; the episode was cut, but its value goes on after ``next_obs``."""
    next_obs: Obs
    """The observation after the decision, of the same episode, [B, ...]."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """T decisions of one env group, in order: the unit that travels from workers to the learner.

    Observations may hold the outputs of the frozen part of a policy in place of its inputs; then all of them do.
    """

    obs: Obs
    """What each decision was made on, [T, N, ...]."""
    chain: Tensor
    """What ``Policy.evaluate`` needs of each decision, float32 [T, N, K+1, H, A]."""
    log_prob_TN: Tensor
    value_TN: Tensor
    reward_TNE: Tensor
    """Reward of each executed control step, 0 after the episode's end."""
    num_steps_TN: Tensor
    terminated_TN: Tensor
    truncated_TN: Tensor
    final_value_TN: Tensor
    """The behaviour critic's value of the last observation on truncated decisions, 0 elsewhere."""
    bootstrap_value_N: Tensor
    """Value of ``last_obs``."""
    version_TN: Tensor
    """int64, the weights that drew each decision."""
    episodes: EpisodeStats
    """Episodes that ended in the fragment."""
    action_TNEA: Tensor = field(default_factory=lambda: torch.empty(0))
    """The executed actions. Workers fill this and what follows; fragments made by hand may leave it out."""
    last_obs: Obs = field(default_factory=dict)
    """The observation after the last decision, [N, ...]."""
    final_obs: Obs = field(default_factory=dict)
    """Last observations of the M episodes that ended, [M, ...]."""
    final_index_M2: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int64))
    """Decision and env of each row of ``final_obs``."""
    worker: int = 0
    group: int = 0
    incarnation: int = 0
    sequence: int = 0

    @property
    def num_env_steps(self) -> int:
        """Control steps really executed in this fragment."""
        return int(self.num_steps_TN.sum())

    def transitions(self) -> Transitions:
        """The T * N decisions of the fragment with their next observations, decision by decision."""
        decision_M, env_M = self.final_index_M2.unbind(-1)
        next_obs = {}
        for key, obs_TN in self.obs.items():
            following_TN = torch.cat([obs_TN[1:], self.last_obs[key].unsqueeze(0)])
            if len(env_M):
                following_TN[decision_M, env_M] = self.final_obs[key]
            next_obs[key] = following_TN.flatten(0, 1)
        return Transitions(
            obs={key: value.flatten(0, 1) for key, value in self.obs.items()},
            action_BEA=self.action_TNEA.flatten(0, 1),
            reward_BE=self.reward_TNE.flatten(0, 1),
            num_steps_B=self.num_steps_TN.flatten(),
            terminated_B=self.terminated_TN.flatten(),
            truncated_B=self.truncated_TN.flatten(),
            next_obs=next_obs,
        )
