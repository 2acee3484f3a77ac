"""The nouns that every part exchanges.

Shape suffixes: N envs, T decisions of a fragment, H planned and E executed actions of a chunk (E <= H), A action
size, K denoise steps. All tensors live on the CPU unless a part says otherwise; observations are dictionaries of
tensors whose leading dimensions are the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Obs = dict[str, Tensor]
TRAIN = "train"  # the split of instructions that are trained on


@dataclass(frozen=True, slots=True)
class CameraSpec:
    """A camera of an environment: ``obs["images.<name>"]`` is uint8 [N, height, width, 3]."""

    name: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What a policy must know of an environment to be built for it, and a robot to run it.

    state_dim: size S of ``obs["state"]``; privileged_dim: size P of ``obs["privileged"]`` (critic only).
    action_dim: A; actions are in [-1, 1]. control_dt_s: seconds between two actions.
    max_episode_steps: time limit in control steps.
    instructions: every text that the task can be told; instruction_goals: what each asks for, which paraphrases share;
    instruction_splits: ``train`` or what each is kept for. ``obs["instruction"]`` indexes them.
    cameras: what is seen; () where the policy gets a state vector alone.
    descriptions: in words, everything that pixels may show; () where the task does not say.
    """

    task: str
    state_dim: int
    privileged_dim: int
    action_dim: int
    control_dt_s: float
    max_episode_steps: int
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    instruction_goals: tuple[str, ...] = ()
    instruction_splits: tuple[str, ...] = ()
    cameras: tuple[CameraSpec, ...] = ()
    descriptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """Episodes that ended in one step call, one row each (M rows, M may be 0)."""

    env_id_M: Tensor  # int64, index in the VecEnv
    return_M: Tensor  # float32, undiscounted sum of rewards
    length_M: Tensor  # int64, control steps
    success_once_M: Tensor  # bool, success held at some step
    success_at_end_M: Tensor  # bool, success held at the last step
    instruction_M: Tensor  # int64, index into the spec's instructions

    @staticmethod
    def concatenate(parts: list[EpisodeStats]) -> EpisodeStats:
        if not parts:
            empty = torch.zeros(0)
            return EpisodeStats(empty.long(), empty, empty.long(), empty.bool(), empty.bool(), empty.long())
        return EpisodeStats(*(torch.cat([getattr(p, name) for p in parts]) for name in EpisodeStats.__slots__))


@dataclass(frozen=True, slots=True)
class Timestep:
    """Result of executing one chunk in N envs (SAME_STEP autoreset).

    obs: the observation to act on next; for an env that ended it is the first one of its new episode.
    reward_NE: reward of each executed control step, 0 after the episode's end.
    num_steps_N: control steps really executed (1..E): the discount of this decision is gamma ** num_steps.
    terminated_N, truncated_N: never both true for one env.
    final_ids: rows that ended; final_obs: their last observation, one row per entry of final_ids.
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
