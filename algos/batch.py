"""Merge the fragments of a batch and flatten them to rows, in an order that does not depend on their arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.algos import losses
from embodied.algos.share import Share
from embodied.core.episodes import EpisodeStats
from embodied.core.learners import Learners
from embodied.core.policy import Policy
from embodied.core.types import Evaluation, Fragment, Obs

NUMBERS = (
    "log_prob_TN", "value_TN", "reward_TNE", "num_steps_TN", "terminated_TN", "truncated_TN", "final_value_TN",
    "version_TN",
)  # fmt: skip
"""Fields of a fragment that every process needs of all decisions."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B = T * N decisions on the learner's device. All but ``columns`` are those of ``share`` alone."""

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
    share: Share = field(default_factory=Share)
    """Decisions that this learner process has; all if there is one process."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "behaviour", "proximal", "alpha", "advantage", "return", "value", "weight", "kl_weight",
    )  # fmt: skip
    """Log-probabilities of the behaviour and the proximal policy, ``losses.interpolation_alpha``, advantage, value
    target, the behaviour critic's value, 1 for decisions that count (0: masked), 1 for those that measure the KL."""

    def column(self, name: str) -> Tensor:
        """Return one of COLUMNS, [B]."""
        return self.columns[self.COLUMNS.index(name)]

    def own_columns(self) -> dict[str, Tensor]:
        """Return COLUMNS of the decisions of ``share`` by name; if it has none, one that counts for nothing."""
        columns = self.share.own(self.columns.T).T
        if not columns.shape[1]:
            columns = columns.new_zeros(len(columns), 1)
        return dict(zip(self.COLUMNS, columns.unbind(0), strict=True))

    def select(self, index: Tensor) -> Batch:
        """Return the decisions ``index``, int64 [n]."""
        own, share = self.share.select(index)
        obs = {key: value.index_select(0, own) for key, value in self.obs.items()}
        reference, reduced_BR = (
            None if part is None else part.index_select(0, own) for part in (self.reference, self.reduced_BR)
        )
        chain, proximal = self.chain.index_select(0, own), self.proximal.index_select(0, own)
        return Batch(obs, chain, self.columns.index_select(1, index), proximal, reference, reduced_BR, share)


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


def share_of(fragments: Sequence[Fragment], learners: Learners) -> tuple[Fragment, Share]:
    """Merge the fragments of this process; return them with the numbers of the whole batch, and which rows are own.

    The order of the whole batch is that of ``merge_fragments`` of all, whichever process has which fragment.
    ValueError in all processes if the fragments differ in the number of decisions T.
    """
    own = merge_fragments(fragments)
    if learners.size == 1:
        return own, Share()
    mine_N = _own_envs(fragments, learners)
    rows, envs = Share(learners, mine_N.repeat(len(own.value_TN))), Share(learners, mine_N)
    shape = (len(own.value_TN), len(mine_N))
    numbers = {name: rows.join(getattr(own, name).flatten(0, 1)).unflatten(0, shape) for name in NUMBERS}
    return replace(own, **numbers, bootstrap_value_N=envs.join(own.bootstrap_value_N)), rows


def _own_envs(fragments: Sequence[Fragment], learners: Learners) -> Tensor:
    """Return which envs of the whole batch are in the fragments of this process, bool [N]."""
    counts = torch.zeros(learners.size, dtype=torch.int64)
    counts[learners.rank] = len(fragments)
    counts = learners.sum(counts)
    first = int(counts[: learners.rank].sum())
    table = torch.zeros(int(counts.sum()), 6, dtype=torch.int64)
    for row, f in enumerate(fragments, first):
        table[row] = torch.tensor([f.worker, f.group, f.incarnation, f.sequence, *f.value_TN.shape])
    rows = learners.sum(table).tolist()
    lengths = sorted({row[4] for row in rows})
    if len(lengths) > 1:
        raise ValueError(f"fragments of one batch must agree in T, got {lengths}")
    order = sorted(range(len(rows)), key=lambda row: rows[row][:4])
    mine = [torch.full((rows[row][5],), first <= row < first + len(fragments)) for row in order]
    return torch.cat(mine)


def flatten(value_TN: Tensor) -> Tensor:
    """Flatten [T, N, ...] to [B, ...] with B = T * N; a view if the memory layout allows it."""
    return value_TN.flatten(0, 1)


def flatten_obs(obs: Obs, device: torch.device) -> Obs:
    """Flatten every key from [T, N, ...] to [B, ...], on ``device``."""
    return {key: flatten(value).to(device, non_blocking=True) for key, value in obs.items()}


@torch.no_grad()
def evaluate_in_pieces(policy: Policy, obs: Obs, chain: Tensor, size: int) -> Evaluation:
    """Return ``policy.evaluate`` of B decisions, computed for ``size`` of them at a time."""
    pieces = [slice(start, start + size) for start in range(0, len(chain), size)]
    parts = [policy.evaluate({k: v[piece] for k, v in obs.items()}, chain[piece]) for piece in pieces]

    shares = [part.log_prob_BE for part in parts if part.log_prob_BE is not None]
    terms = [part.terms_B for part in parts if part.terms_B is not None]
    return replace(
        parts[0],
        log_prob_B=torch.cat([part.log_prob_B for part in parts]),
        entropy_B=torch.cat([part.entropy_B for part in parts]),
        value_B=torch.cat([part.value_B for part in parts]),
        distribution=torch.cat([part.distribution for part in parts]),
        log_prob_BE=torch.cat(shares) if shares else None,
        terms_B=torch.cat(terms) if terms else None,
    )


def evaluate_rows(policy: Policy, obs: Obs, chain: Tensor, rows: Tensor, size: int) -> Evaluation:
    """Return ``evaluate_in_pieces`` of a selection of the decisions, int64 rows."""
    if not torch.equal(rows, torch.arange(len(chain), device=rows.device)):
        obs, chain = {key: value.index_select(0, rows) for key, value in obs.items()}, chain.index_select(0, rows)
    return evaluate_in_pieces(policy, obs, chain, size)


def behaviour_sample_size(batch: Batch, log_prob_B: Tensor) -> Tensor:
    """Return the effective sample size of the weights current / behaviour over valid decisions, a scalar.

    log_prob_B: log-probabilities under the current weights, of all decisions.
    """
    kept = batch.column("weight") > 0
    return losses.effective_sample_size(losses.log_ratio(log_prob_B, batch.column("behaviour"))[kept])


def explained_variance(batch: Batch) -> float:
    """Return 1 - Var(return - value) / Var(return) of the behaviour critic over valid decisions.

    0 if the returns do not vary.
    """
    kept = batch.column("weight") > 0
    target, value = batch.column("return")[kept], batch.column("value")[kept]
    if target.numel() == 0 or float(target.var(correction=0)) == 0:
        return 0.0
    return 1 - float((target - value).var(correction=0) / target.var(correction=0))
