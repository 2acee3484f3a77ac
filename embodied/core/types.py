"""The values that parts exchange: observations, timesteps, decisions, transitions and fragments.

Shape suffixes: N envs, T decisions of a fragment, H planned and E executed actions of a chunk (E <= H), A action
size, K denoise steps, B decisions of a batch, M episodes that ended. Tensors are on the CPU unless stated otherwise.
An observation is a dictionary of tensors whose leading dimensions are those of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from embodied.core.episodes import EpisodeStats

Obs = dict[str, Tensor]


class Role(IntEnum):
    """Role that a pixel's body has in the instruction: the values of ``masks.<camera>`` in labelled observations."""

    NONE = 0
    """Neither an object nor a place."""
    OBJECT = 1
    OTHER_OBJECT = 2
    """The object that the instruction names, and any other object."""
    PLACE = 3
    OTHER_PLACE = 4
    """The place that the instruction names, and any other place."""


@dataclass(frozen=True, slots=True)
class Timestep:
    """Result of executing one chunk in N envs (SAME_STEP autoreset)."""

    obs: Obs
    """Observation for the next decision, [N, ...]; the first one of the new episode if the env ended."""
    reward_NE: Tensor
    """float32, reward of each executed control step; 0 after the episode's end."""
    terminated_N: Tensor
    """bool, the episode ended in a terminal state; never true together with ``truncated_N``."""
    truncated_N: Tensor
    """bool, the episode was cut, for instance by its time limit."""
    num_steps_N: Tensor
    """int64, executed control steps, 1 to E. The discount of the decision is gamma ** num_steps. 0 if the
    simulation diverged: the episode is truncated and the decision is ignored."""
    final_ids: Tensor
    """int64 [M], indices of the envs that ended, ascending."""
    final_obs: Obs
    """Last observations of the episodes that ended, [M, ...], in the order of ``final_ids``."""
    episodes: EpisodeStats
    """Statistics of the episodes that ended, M rows."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """For each of ``EnvSpec.outcomes``, whether it held after the last executed step, bool [N]."""

    @property
    def reward_N(self) -> Tensor:
        """Undiscounted reward of the chunk, [N]."""
        return self.reward_NE.sum(-1)


@dataclass(frozen=True, slots=True)
class PolicySample:
    """One decision for each of N envs."""

    action_NHA: Tensor
    """Planned chunk in units of [-1, 1], not clipped."""
    log_prob_N: Tensor
    """Log-probability of the decision under the weights that drew it."""
    value_N: Tensor
    """The critic's value of the observation."""
    chain: Tensor
    """Input of ``Policy.evaluate`` that gives ``log_prob_N`` again, float32 [N, ...].

    Flow policies with stochastic_steps=all: the denoise states, [N, K+1, H, W]. With one or last: start, end and index
    of the stochastic step, [N, 3, H, W]. W is A or the model's padded width. A Gaussian: its draw, [N, 1, H, A]."""
    version_N: Tensor | None = None
    """int64, version of the weights that drew the decision. The actor server sets it, not the policy."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of ``Policy.evaluate`` for B decisions; its tensors are differentiable."""

    log_prob_B: Tensor
    """Exact log-probability of each decision."""
    entropy_B: Tensor
    """Entropy (nats) of the distribution that the decision was drawn from."""
    value_B: Tensor
    distribution: Tensor
    """Parameters of the distributions that the decision was drawn from, [B, ...], for ``Policy.kl_divergence``. A
    Gaussian has means and standard deviations of the executed actions, [B, 2, steps, E, A]."""
    log_prob_BE: Tensor | None = None
    """Part of each scored action in the sum ``log_prob_B``. If None, only ``algo.reduction=sum`` works."""
    terms_B: Tensor | None = None
    """Number of scalar densities that ``log_prob_B`` sums, as floats; None together with ``log_prob_BE``."""
    scored_share: float = 1.0
    """Fraction of the decision's random choices that ``log_prob_B`` and ``distribution`` contain: 1/K if one of K
    denoise steps was drawn at random. The KL of the decision is then on average K times the KL of ``distribution``."""

    @classmethod
    def of(
        cls, log_prob_BE: Tensor, entropy_B: Tensor, value_B: Tensor, distribution: Tensor,
        terms: Tensor | int, scored_share: float = 1.0,
    ) -> Evaluation:  # fmt: skip
        """Build an evaluation from the shares of the scored actions. terms: ``terms_B``, or its one value."""
        terms_B = terms if isinstance(terms, Tensor) else torch.full_like(log_prob_BE[:, 0].detach(), terms)
        return cls(log_prob_BE.sum(-1), entropy_B, value_B, distribution, log_prob_BE, terms_B, scored_share)


@dataclass(frozen=True, slots=True)
class Transitions:
    """B decisions with their results, for off-policy algorithms and replay buffers.

    Observations and actions are on the device of the fragment's tensors. All other tensors are on the CPU.
    """

    obs: Obs
    """Observation of each decision, [B, ...]."""
    action_BEA: Tensor
    """Actions of the chunk; those after an episode's end were not executed."""
    reward_BE: Tensor
    """Reward of each executed control step; 0 after the episode's end."""
    num_steps_B: Tensor
    """int64, executed control steps. The discount of ``next_obs`` is gamma ** num_steps."""
    terminated_B: Tensor
    """bool, the episode ended in a terminal state at ``next_obs``, whose value is 0."""
    truncated_B: Tensor
    """bool, the episode was cut at ``next_obs``, whose value still counts."""
    next_obs: Obs
    """Observation after the decision, of the same episode, [B, ...]."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """T decisions of one env group, in order: the unit that travels from workers to the learner.

    Observations, chain and actions are on the simulator's device if the learner has the same device. All other tensors
    are on the CPU. Observations may hold the outputs of a policy's frozen part in place of its inputs; then all
    observations of the fragment do.
    """

    obs: Obs
    """Observation of each decision, [T, N, ...]."""
    chain: Tensor
    """``PolicySample.chain`` of each decision, float32 [T, N, ...]."""
    log_prob_TN: Tensor
    """Log-probability under the weights that drew the decision."""
    value_TN: Tensor
    """The behaviour critic's value of ``obs``."""
    reward_TNE: Tensor
    """Reward of each executed control step; 0 after the episode's end."""
    num_steps_TN: Tensor
    """int64, executed control steps, 1 to E; 0 for a decision that is ignored (``Timestep.num_steps_N``)."""
    terminated_TN: Tensor
    truncated_TN: Tensor
    """bool, whether the episode ended in a terminal state, or was cut, during the decision."""
    final_value_TN: Tensor
    """The behaviour critic's value of the last observation for truncated decisions, of ``obs`` for ignored ones; 0
    elsewhere."""
    bootstrap_value_N: Tensor
    """The behaviour critic's value of ``last_obs``."""
    version_TN: Tensor
    """int64, version of the weights that drew each decision."""
    episodes: EpisodeStats
    """Statistics of the M episodes that ended in the fragment."""
    action_TNEA: Tensor = field(default_factory=lambda: torch.empty(0))
    """Executed actions. Workers fill this and the fields below; fragments made by hand may leave them out."""
    last_obs: Obs = field(default_factory=dict)
    """Observation after the last decision, [N, ...]."""
    final_obs: Obs = field(default_factory=dict)
    """Last observations of the M episodes that ended, [M, ...]."""
    final_index_M2: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int64))
    """Decision and env of each row of ``final_obs``."""
    worker: int = 0
    group: int = 0
    """Indices of the env worker, and of the env group in its worker."""
    incarnation: int = 0
    sequence: int = 0
    """Number of the fragment's ticket, in the order in which the ledger admits them."""

    @property
    def num_env_steps(self) -> int:
        """Number of control steps executed in the fragment."""
        return int(self.num_steps_TN.sum())

    def transitions(self) -> Transitions:
        """Return the decisions that are not ignored, with next observations, ordered by decision, then by env."""
        counts_B = self.num_steps_TN.flatten() > 0
        decision_M, env_M = self.final_index_M2.unbind(-1)
        next_obs = {}
        for key, obs_TN in self.obs.items():
            following_TN = torch.cat([obs_TN[1:], self.last_obs[key].unsqueeze(0)])
            if len(env_M):
                following_TN[decision_M, env_M] = self.final_obs[key]
            next_obs[key] = following_TN.flatten(0, 1)[counts_B]
        return Transitions(
            obs={key: value.flatten(0, 1)[counts_B] for key, value in self.obs.items()},
            action_BEA=self.action_TNEA.flatten(0, 1)[counts_B],
            reward_BE=self.reward_TNE.flatten(0, 1)[counts_B],
            num_steps_B=self.num_steps_TN.flatten()[counts_B],
            terminated_B=self.terminated_TN.flatten()[counts_B],
            truncated_B=self.truncated_TN.flatten()[counts_B],
            next_obs=next_obs,
        )
