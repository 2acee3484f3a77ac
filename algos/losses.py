"""Policy and value losses, and the off-policy corrections behind one switch.

Three policies appear in the losses. The behaviour policy b drew the data, possibly some versions ago. The proximal
policy p has the weights at the start of this update; PPO's trust region is around it. The current policy is trained.
All functions are per item, over B decisions; `masked_mean` reduces. Corrections, with A the advantage,
u = current / p and r = current / b:

    decoupled   w * min(u A, clip(u) A), w = stopgrad(min(p / b, cap))      AReaL (Fu et al. 2025)
    vtrace      min(u A, clip(u) A), A already weighted by V-trace          IMPALA (Espeholt et al. 2018)
    tis         min(r, cap) * A, no gradient beyond the cap                 truncated importance sampling (Ionides 2008)
    aipo        gradient min(r, cap) * A * grad log current                 LlamaRL (Wu et al. 2025), one-sided
    none        min(r A, clip(r) A): the behaviour is used as proximal      PPO (Schulman et al. 2017)

On fresh data p = b; decoupled, vtrace and none are then equal.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.errors import UserError
from embodied.core.types import Evaluation

KL = 2  # index of the KL in ``MinibatchLoss.statistics``
MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is far beyond every clip range; float32 would overflow at exp(88)


class PolicyTerm(NamedTuple):
    """The policy's part of the loss for B decisions."""

    objective_B: Tensor
    """Objective, to be maximised."""
    log_ratio_B: Tensor
    """Log of current / p, or of current / b for corrections without p."""
    clipped_B: Tensor
    """Whether the ratio was clipped, 0 or 1; a mean over the clipped ratios if there are several."""


class MinibatchLoss(NamedTuple):
    """Loss of a minibatch. All but ``total`` is detached."""

    total: Tensor
    """Scalar to minimise."""
    statistics: Tensor
    """Policy loss, value loss, ``trust_region_kl`` (at index KL), clip fraction and entropy, [5]."""
    log_ratio_B: Tensor
    """Log ratio to the proximal policy, around which the trust region lies."""
    log_prob_B: Tensor
    """Log-probability under the weights that the loss was computed with."""


def masked_mean(value_B: Tensor, weight_B: Tensor) -> Tensor:
    """Return the sum of weight * value divided by the number of *all* items, masked ones included. Scalar."""
    return torch.dot(value_B, weight_B) / len(weight_B)


def valid_mean(value_B: Tensor, weight_B: Tensor) -> Tensor:
    """Return the mean over the items that are not masked, for statistics; 0 if all are. Scalar."""
    return torch.dot(value_B, weight_B) / weight_B.sum().clamp_min(1)


def mean_statistics(rows: Sequence[Tensor], measured: Sequence[Tensor]) -> Tensor:
    """Return the means of minibatches' statistics; a KL that no decision measures, ``measured`` false, is left out."""
    means = torch.stack(tuple(rows)).mean(0)
    means[KL] /= torch.stack(tuple(measured)).to(means).mean().clamp_min(1 / len(rows))
    return means


def log_ratio(log_prob_B: Tensor, reference_B: Tensor) -> Tensor:
    """Return log(pi / reference), bounded to +-MAX_LOG_RATIO (no gradient beyond), [B]."""
    return (log_prob_B - reference_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def effective_sample_size(log_weight_B: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) in (0, 1], computed in log space; 1 for equal weights, 0 for no item. Scalar."""
    if log_weight_B.numel() == 0:
        return log_weight_B.new_zeros(())
    return 1 / (log_weight_B.numel() * log_weight_B.softmax(0).square().sum())


def behaviour_weight(proximal_B: Tensor, behaviour_B: Tensor, cap: float) -> Tensor:
    """Return stopgrad(min(p / b, cap)) from log-probabilities, [B]."""
    return log_ratio(proximal_B, behaviour_B).exp().clamp(max=cap).detach()


def interpolation_alpha(staleness: Tensor) -> Tensor:
    """Return alpha = (v_p - v_b) / (v - v_b) in [0, 1) from staleness = version - v_b (0 for fresh data), per item.

    The proximal policy is that of the start of the update, v_p = version; the update leads to v = version + 1. So
    alpha = staleness / (staleness + 1): p = b for fresh data, and p is close to the current policy for old data.
    """
    return staleness / (staleness + 1)


def interpolate_proximal(log_prob_B: Tensor, behaviour_B: Tensor, alpha_B: Tensor) -> Tensor:
    """Return stopgrad(log b + alpha (log current - log b)): a proximal policy without a forward pass, [B]."""
    return torch.lerp(behaviour_B, log_prob_B.detach(), alpha_B)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_range: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return PPO's min(u A, clip(u, 1 +- clip_range) A) and whether u was clipped, both in the shape of the ratios.

    With dual_clip c > 1 the objective of a negative advantage is bounded below by c A (Ye et al. 2020). The bound stops
    the gradient of a bad action that has become far more probable.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        floor = torch.where(advantage < 0, dual_clip * advantage, -torch.inf)
        objective = torch.maximum(objective, floor)
    return objective, (ratio != bounded).to(ratio.dtype)


def truncated_objective(log_ratio_B: Tensor, advantage_B: Tensor, cap: float, beyond: bool) -> tuple[Tensor, Tensor]:
    """Return min(r, cap) A and whether r exceeded the cap, both [B].

    beyond=False: constant beyond the cap, no gradient there (TIS). beyond=True: cap (1 + log(r / cap)) A beyond the
    cap, so that the gradient is min(r, cap) A grad log pi everywhere (AIPO).
    """
    ratio_B = log_ratio_B.exp()
    objective_B = ratio_B.clamp(max=cap) * advantage_B
    if beyond:
        objective_B = objective_B + cap * (log_ratio_B - math.log(cap)).clamp(min=0) * advantage_B
    return objective_B, (ratio_B > cap).to(ratio_B.dtype)


def reduce_log_prob(evaluation: Evaluation, reduction: str) -> tuple[Tensor, Tensor | int]:
    """Return the log-probabilities [B, R] whose ratios PPO clips under one of REDUCTIONS, and a scale.

    sum: the decision's exact log-probability (R = 1). mean: the same divided by the number of terms of the whole
    decision (R = 1). action: one for each executed action (R = E). The scale is the factor of the mean over the R
    objectives; its gradient at ratio 1 is then that of the exact log-probability.
    UserError if the policy does not give the shares of its actions.
    """
    if reduction == "sum":
        return evaluation.log_prob_B[:, None], 1
    if evaluation.log_prob_BE is None or evaluation.terms_B is None:
        raise UserError(f"algo.reduction={reduction} needs a policy that gives its actions' shares; use reduction=sum")
    if reduction == "action":
        return evaluation.log_prob_BE, evaluation.log_prob_BE.shape[-1]
    terms_B = (evaluation.terms_B / evaluation.scored_share).round()
    return (evaluation.log_prob_B / terms_B)[:, None], terms_B


def policy_term(
    correction: str,
    log_prob_B: Tensor,
    behaviour_B: Tensor,
    proximal_B: Tensor,
    advantage_B: Tensor,
    *,
    reduced_ratio_BR: Tensor | None = None,
    reduced_scale: Tensor | int = 1,
    clip_range: float,
    dual_clip: float | None,
    behaviour_cap: float,
) -> PolicyTerm:
    """Return the objective of one of CORRECTIONS from log-probabilities under the three policies.

    reduced_ratio_BR: log ratios current / p that are clipped in place of the decision's, each with the decision's
    advantage; the objective is reduced_scale times their mean. The weight that corrects for the behaviour and
    log_ratio_B are still those of the exact log-probability.
    """
    if correction in ("tis", "aipo"):
        log_ratio_B = log_ratio(log_prob_B, behaviour_B)
        objective_B, clipped_B = truncated_objective(log_ratio_B, advantage_B, behaviour_cap, correction == "aipo")
        return PolicyTerm(objective_B, log_ratio_B, clipped_B)
    log_ratio_B = log_ratio(log_prob_B, behaviour_B if correction == "none" else proximal_B)
    ratio_BR = log_ratio_B[:, None] if reduced_ratio_BR is None else reduced_ratio_BR
    objective_BR, clipped_BR = clipped_surrogate(ratio_BR, advantage_B[:, None], clip_range, dual_clip)
    objective_B, clipped_B = reduced_scale * objective_BR.mean(-1), clipped_BR.mean(-1)
    if correction == "decoupled":
        objective_B = objective_B * behaviour_weight(proximal_B, behaviour_B, behaviour_cap)
    return PolicyTerm(objective_B, log_ratio_B, clipped_B)


def value_error(
    value_B: Tensor, old_value_B: Tensor, return_B: Tensor, value_clip: float | None, huber_delta: float | None
) -> Tensor:
    """Return the loss of each value prediction, [B]: torch's Huber loss, or the squared error if huber_delta is None.

    With value_clip c it is the larger of this loss and the loss of the value clipped to within c of ``old_value_B``,
    the behaviour critic's value. Near 0 the Huber loss is half the squared error.
    """

    def loss(predicted_B: Tensor) -> Tensor:
        if huber_delta is None:
            return functional.mse_loss(predicted_B, return_B, reduction="none")
        return functional.huber_loss(predicted_B, return_B, reduction="none", delta=huber_delta)

    if value_clip is None:
        return loss(value_B)
    bounded_B = old_value_B + (value_B - old_value_B).clamp(-value_clip, value_clip)
    return torch.maximum(loss(value_B), loss(bounded_B))
