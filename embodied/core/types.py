"""The nouns that every part exchanges.

Shape suffixes: N envs, T decisions of a fragment, H planned and E executed actions of a chunk (E <= H), A action
size, K denoise steps. All tensors live on the CPU unless a part says otherwise; observations are dictionaries of
tensors whose leading dimensions are the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
class Fragment:
    """T decisions of one env group, in order: the unit that travels from workers to the learner.

    final_value_TN is the behaviour critic's V(final_obs) on truncated decisions, 0 elsewhere; bootstrap_value_N is
    V of the observation after the last decision. version_TN says which weights drew each decision.
    """

    obs: Obs  # each [T, N, ...]
    chain: Tensor  # [T, N, K+1, H, A] float32
    log_prob_TN: Tensor
    value_TN: Tensor
    reward_TNE: Tensor
    num_steps_TN: Tensor
    terminated_TN: Tensor
    truncated_TN: Tensor
    final_value_TN: Tensor
    bootstrap_value_N: Tensor
    version_TN: Tensor
    episodes: EpisodeStats
    worker: int = 0
    group: int = 0
    incarnation: int = 0
    sequence: int = 0

    @property
    def num_env_steps(self) -> int:
        """Control steps really executed in this fragment."""
        return int(self.num_steps_TN.sum())
