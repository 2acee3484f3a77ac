"""Merge the fragments of a batch and flatten them to rows, in an order that does not depend on their arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from embodied.core.episodes import EpisodeStats
from embodied.core.policy import Policy
from embodied.core.types import Evaluation, Fragment, Obs

DECISION_FIELDS = (
    "chain", "log_prob_TN", "value_TN", "reward_TNE", "num_steps_TN", "terminated_TN", "truncated_TN", "final_value_TN",
    "version_TN",
)  # fmt: skip
"""Tensors of a fragment with a row for each decision, [T, N, ...], that every fragment has."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B = T * N decisions on the learner's device."""

    obs: Obs
    """Observation of each decision, [B, ...]."""
    chain: Tensor
    """``PolicySample.chain`` of each decision, [B, ...]."""
    columns: Tensor
    """Numbers of each decision, [8, B], in the order of COLUMNS; a minibatch selects all of them at once."""
    proximal: Tensor
    """``Evaluation.distribution`` of the proximal policy, [B, ...]; 0 for decisions without a ``kl_weight``."""
    reference: Tensor | None = None
    """``Evaluation.distribution`` of the reference policy, [B, ...]; None if there is none."""
    reduced_BR: Tensor | None = None
    """``losses.reduce_log_prob`` of the proximal policy; None if the reduction is the sum."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "behaviour", "proximal", "alpha", "advantage", "return", "value", "weight", "kl_weight",
    )  # fmt: skip
    """Log-probabilities of the behaviour and the proximal policy, ``losses.interpolation_alpha``, advantage, value
    target, the behaviour critic's value, 1 for decisions that count (0: masked), 1 for those that measure the KL."""

    def __len__(self) -> int:
        return self.columns.shape[1]

    def column(self, name: str) -> Tensor:
        """Return one of COLUMNS, [B]."""
        return self.columns[self.COLUMNS.index(name)]

    def select(self, index: Tensor) -> Batch:
        """Return the decisions ``index``, int64 [n]."""
        return Batch(
            obs={key: value.index_select(0, index) for key, value in self.obs.items()},
            chain=self.chain.index_select(0, index),
            columns=self.columns.index_select(1, index),
            proximal=self.proximal.index_select(0, index),
            reference=None if self.reference is None else self.reference.index_select(0, index),
            reduced_BR=None if self.reduced_BR is None else self.reduced_BR.index_select(0, index),
        )


register_dataclass(Batch)  # its tensors are arguments of recorded kernels


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
    merged: dict[str, Any] = {name: torch.cat([getattr(f, name) for f in ordered], 1) for name in DECISION_FIELDS}
    if all(fragment.last_obs for fragment in ordered):
        first_env, final_index = 0, []
        for fragment in ordered:
            final_index.append(fragment.final_index_M2 + torch.tensor([0, first_env]))
            first_env += fragment.value_TN.shape[1]
        merged["final_index_M2"] = torch.cat(final_index)
        merged["action_TNEA"] = torch.cat([f.action_TNEA for f in ordered], 1)
        merged["last_obs"] = _concatenate([f.last_obs for f in ordered])
        merged["final_obs"] = _concatenate([f.final_obs for f in ordered if f.final_obs])
    return Fragment(
        obs=_concatenate([f.obs for f in ordered], dim=1),
        bootstrap_value_N=torch.cat([f.bootstrap_value_N for f in ordered]),
        episodes=EpisodeStats.concatenate([f.episodes for f in ordered]),
        **merged,
    )


def _concatenate(parts: Sequence[Obs], dim: int = 0) -> Obs:
    """Concatenate observations of the same keys; empty if there are none."""
    return {key: torch.cat([part[key] for part in parts], dim) for key in (parts[0] if parts else ())}


@torch.no_grad()
def evaluate_in_pieces(policy: Policy, obs: Obs, chain: Tensor, size: int) -> Evaluation:
    """Return ``policy.evaluate`` of B decisions, computed for ``size`` of them at a time."""
    pieces = [slice(start, start + size) for start in range(0, len(chain), size)]
    parts = [policy.evaluate({k: v[piece] for k, v in obs.items()}, chain[piece]) for piece in pieces]
    joined: dict[str, Any] = {field.name: getattr(parts[0], field.name) for field in fields(Evaluation)}
    for name, value in joined.items():
        if isinstance(value, Tensor):
            joined[name] = torch.cat([getattr(part, name) for part in parts])
    return Evaluation(**joined)
