"""Merge the fragments of a batch and flatten them to rows, in an order that does not depend on their arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.core.episodes import EpisodeStats
from embodied.core.types import Fragment, Obs


@dataclass(frozen=True, slots=True)
class Batch:
    """B = T * N decisions on the learner's device."""

    obs: Obs
    """Observation of each decision, [B, ...]."""
    chain: Tensor
    """``PolicySample.chain`` of each decision, [B, ...]."""
    columns: Tensor
    """Numbers of each decision, [8, B], in the order of COLUMNS; a minibatch selects all of them at once."""
    reduced_BR: Tensor | None = None
    """``losses.reduce_log_prob`` of the proximal policy; None if the reduction is the sum."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "behaviour", "proximal", "alpha", "advantage", "return", "value", "weight", "reference",
    )  # fmt: skip
    """Log-probabilities of the behaviour and the proximal policy, ``losses.interpolation_alpha``, advantage, value
    target, the behaviour critic's value, 1 for decisions that count (0: masked), log-probability of the reference."""

    def column(self, name: str) -> Tensor:
        """Return one of COLUMNS, [B]."""
        return self.columns[self.COLUMNS.index(name)]

    def select(self, index: Tensor) -> Batch:
        """Return the decisions ``index``, int64 [n]."""
        obs = {key: value.index_select(0, index) for key, value in self.obs.items()}
        reduced_BR = None if self.reduced_BR is None else self.reduced_BR.index_select(0, index)
        return Batch(obs, self.chain.index_select(0, index), self.columns.index_select(1, index), reduced_BR)


def merge_fragments(fragments: Sequence[Fragment]) -> Fragment:
    """Concatenate fragments along N, sorted by (worker, group, incarnation, sequence).

    ValueError if there is none, or if they differ in the number of decisions T or in observation keys.
    """
    if not fragments:
        raise ValueError("an update needs at least one fragment, got none")
    if len(fragments) == 1:
        return fragments[0]
    ordered = sorted(fragments, key=lambda f: (f.worker, f.group, f.incarnation, f.sequence))
    kinds = {(len(f.value_TN), tuple(sorted(f.obs))) for f in ordered}
    if len(kinds) > 1:
        raise ValueError(f"fragments of one batch must agree in T and in observation keys, got {sorted(kinds)}")

    def join(name: str) -> Tensor:
        return torch.cat([getattr(f, name) for f in ordered], dim=1)

    return Fragment(
        obs={key: torch.cat([f.obs[key] for f in ordered], dim=1) for key in ordered[0].obs},
        chain=join("chain"),
        log_prob_TN=join("log_prob_TN"),
        value_TN=join("value_TN"),
        reward_TNE=join("reward_TNE"),
        num_steps_TN=join("num_steps_TN"),
        terminated_TN=join("terminated_TN"),
        truncated_TN=join("truncated_TN"),
        final_value_TN=join("final_value_TN"),
        bootstrap_value_N=torch.cat([f.bootstrap_value_N for f in ordered]),
        version_TN=join("version_TN"),
        episodes=EpisodeStats.concatenate([f.episodes for f in ordered]),
        **_merge_ends(ordered),
    )


def _merge_ends(fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Return the merged fields from ``action_TNEA`` to ``final_index_M2``; empty if a fragment lacks them."""
    if not all(fragment.last_obs for fragment in fragments):
        return {}
    first_env, indices = 0, []
    for fragment in fragments:
        indices.append(fragment.final_index_M2 + torch.tensor([0, first_env]))
        first_env += fragment.value_TN.shape[1]
    ended = [fragment for fragment in fragments if fragment.final_obs]
    final_obs = {key: torch.cat([f.final_obs[key] for f in ended]) for key in ended[0].final_obs} if ended else {}
    return {
        "action_TNEA": torch.cat([f.action_TNEA for f in fragments], dim=1),
        "last_obs": {key: torch.cat([f.last_obs[key] for f in fragments]) for key in fragments[0].last_obs},
        "final_obs": final_obs,
        "final_index_M2": torch.cat(indices),
    }


def flatten(value_TN: Tensor) -> Tensor:
    """Flatten [T, N, ...] to [B, ...] with B = T * N; a view if the memory layout allows it."""
    return value_TN.flatten(0, 1)


def flatten_obs(obs: Obs, device: torch.device) -> Obs:
    """Flatten every key from [T, N, ...] to [B, ...], on ``device``."""
    return {key: flatten(value).to(device, non_blocking=True) for key, value in obs.items()}
