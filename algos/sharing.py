"""Sums that keep the learner processes of one update equal. With one process nothing is summed.

    process r: own fragments ─► advantages ─► minibatches ─► loss ─► gradients ─► clip ─► Adam
                                    ▲                         │          ▲                  ▲
                                mean, std                     └─ KL ─────┼──► learning rate ┘
                                    └───────── sums over the processes ──┘

Each process has its own minibatches; the k-th minibatches of all processes together make one step. All processes make
the same number of sums and get the same bits from them. So they stay equal, whatever decisions each of them has.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embodied.algos.losses import KL
from embodied.core.algorithm import Metrics, ProcessGroup
from embodied.core.types import Obs

NORMALIZED = ("state", "privileged")
"""Observations of which policies keep statistics."""


class DecisionCounts(NamedTuple):
    """Decisions of a batch, counted over all processes."""

    fewest: int
    """Decisions of the process that has the fewest."""
    valid: int
    """Decisions that are not masked."""
    metrics: Metrics
    """Ages of the executed decisions, in versions, and the number of those that are masked because of their age."""


def count_decisions(
    weight_B: Tensor, staleness_M: Tensor, max_staleness: int | None, group: ProcessGroup
) -> DecisionCounts:
    """Count the decisions. weight_B: 1 for those that are not masked. staleness_M: ages of the executed ones."""
    oldest = int(staleness_M.max()) if len(staleness_M) else 0
    dropped = 0 if max_staleness is None else int((staleness_M > max_staleness).sum())
    own = [len(weight_B), int(weight_B.sum()), dropped, len(staleness_M), int(staleness_M.sum()), oldest]
    table = torch.zeros(group.size, len(own), dtype=torch.int64)
    table[group.rank] = torch.tensor(own)
    table = group.sum(table)
    _, valid, dropped, executed, ages, _ = table.sum(0).tolist()
    metrics = {
        "async/staleness_mean": ages / max(executed, 1),
        "async/staleness_max": float(table[:, -1].max()),
        "async/dropped": float(dropped),
    }
    return DecisionCounts(int(table[:, 0].min()), valid, metrics)


def mean_and_std(values: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return mean and biased standard deviation of the values [n] of all processes; 0 if there is none. Scalars."""
    if group.size == 1 and len(values):
        return values.mean(), values.std(correction=0)
    x = values.double()
    num, total, squares = group.sum(torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()])).unbind()
    mean = total / num.clamp_min(1)
    var = squares / num.clamp_min(1) - mean.square()
    return mean.to(values), var.clamp_min(0).sqrt().to(values)


def average(values: Tensor, counts: Tensor, group: ProcessGroup) -> Tensor:
    """Return means over the decisions of all processes, in the shape of values.

    values: means over the decisions of this process. counts: how many these are, in the same shape.
    """
    if group.size == 1:
        return values
    sums, counts = group.sum(torch.stack([values * counts, counts])).unbind()
    return sums / counts.clamp_min(1)


def average_metrics(metrics: Metrics, num: Tensor, group: ProcessGroup) -> Metrics:
    """Return the means of the metrics over the processes, weighted by their numbers of decisions, ``num``."""
    if group.size == 1:
        return metrics
    values = torch.tensor(list(metrics.values()), dtype=torch.float64)
    means = average(values, torch.full_like(values, float(num)), group)
    return dict(zip(metrics, means.tolist(), strict=True))


def reduce_step(
    parameters: Sequence[nn.Parameter], statistics: Tensor, weight_B: Tensor, kl_weight_B: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Replace gradients by their means over all processes; return the means of the statistics, and if the KL has any.

    Gradients are those of the mean loss of the B decisions of a minibatch; statistics: ``MinibatchLoss.statistics``.
    A parameter without a gradient has none in any process, because all make the same computation.
    """
    if group.size == 1:
        return statistics, kl_weight_B.any()
    num, valid, measured = weight_B.new_tensor(len(weight_B)), weight_B.sum(), kl_weight_B.sum()
    gradients = [p.grad for p in parameters if p.grad is not None]
    counts = torch.stack([num, num, measured, valid, num])
    own = [*(gradient.flatten() * num for gradient in gradients), statistics * counts, counts]
    *sums, statistics, counts = group.sum(torch.cat(own)).split([len(part) for part in own])
    for gradient, part in zip(gradients, sums, strict=True):
        gradient.copy_(part.view_as(gradient) / counts[0])
    return statistics / counts.clamp_min(1), counts[KL] > 0


def gather_normalized(obs: Obs, group: ProcessGroup) -> Obs:
    """Return the observations [B, ...] of which policies keep statistics, from all processes; all keys if one process.

    Tensors that are 0 but for the own rows are summed, which rounds nothing.
    """
    if group.size == 1:
        return obs
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(next(iter(obs.values())))
    sizes = group.sum(sizes)
    first, end = int(sizes[: group.rank].sum()), int(sizes[: group.rank + 1].sum())
    gathered = {}
    for key in NORMALIZED:
        if key in obs:
            rows = obs[key].new_zeros(int(sizes.sum()), *obs[key].shape[1:])
            rows[first:end] = obs[key]
            gathered[key] = group.sum(rows)
    return gathered
