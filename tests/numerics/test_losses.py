"""Losses and corrections: values by hand, gradients by finite differences, behaviour at the edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algos import losses
from embodied.algos.config import CORRECTIONS
from embodied.core.errors import UserError
from embodied.core.types import Evaluation

OPTIONS: dict[str, Any] = {"clip_range": 0.2, "dual_clip": None, "behaviour_cap": 2.0}


def log(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_decoupled_by_hand() -> None:
    # p / b = (1.5, 4 -> cap 2, 0.5), u = (1.1, 1.5, 0.5), A = (1, 2, -3)
    # w min(uA, clip(u) A) = 1.5*1.1, 2*min(3, 2.4), .5*min(-1.5, -2.4)
    behaviour, proximal = log(1, 1, 1), log(1.5, 4, 0.5)
    now = proximal + log(1.1, 1.5, 0.5)
    term = losses.policy_term("decoupled", now, behaviour, proximal, numbers(1, 2, -3), **OPTIONS)
    torch.testing.assert_close(term.objective_B, numbers(1.65, 4.8, -1.2))
    torch.testing.assert_close(term.clipped_B, numbers(0, 1, 1))
    torch.testing.assert_close(term.log_ratio_B, log(1.1, 1.5, 0.5))


@pytest.mark.parametrize("correction", ["decoupled", "vtrace"])
def test_proximal_corrections_are_plain_ppo_when_the_data_is_fresh(correction: str) -> None:
    now, behaviour, advantage = torch.randn(3, 64, dtype=torch.float64).unbind(0)
    got = losses.policy_term(correction, now, behaviour, behaviour, advantage, **OPTIONS)
    plain = losses.policy_term("none", now, behaviour, behaviour, advantage, **OPTIONS)
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a, b)


def test_vtrace_does_not_repeat_the_importance_weight_in_its_ratio() -> None:
    proximal, behaviour = log(1.0), log(0.25)  # p / b = 4
    term = losses.policy_term("vtrace", proximal, behaviour, proximal, numbers(1.0), **OPTIONS)
    torch.testing.assert_close(term.objective_B, numbers(1.0))


def test_none_takes_the_behaviour_as_proximal() -> None:
    term = losses.policy_term("none", log(1.5), log(1.0), log(7.0), numbers(1.0), **OPTIONS)
    torch.testing.assert_close(term.objective_B, numbers(1.2))


@pytest.mark.parametrize(("correction", "beyond"), [("tis", 0.0), ("aipo", 2.0)])
def test_truncation_by_hand(correction: str, beyond: float) -> None:
    """Below the cap of 2 both are r A with gradient r A; at r = 6 TIS has no gradient, AIPO has cap * A."""
    now = log(1.5, 6).requires_grad_()
    term = losses.policy_term(correction, now, log(1, 1), log(1, 1), numbers(1, 1), **OPTIONS)
    expected = numbers(1.5, 2 + beyond * math.log(3))
    torch.testing.assert_close(term.objective_B.detach(), expected)
    (gradient,) = torch.autograd.grad(term.objective_B.sum(), now)
    torch.testing.assert_close(gradient, numbers(1.5, beyond))
    torch.testing.assert_close(term.clipped_B, numbers(0, 1))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_gradients_match_finite_differences(correction: str, dual_clip: float | None) -> None:
    now, behaviour, proximal, advantage = torch.randn(4, 40, dtype=torch.float64).unbind(0)
    options = OPTIONS | {"dual_clip": dual_clip}

    def objective(log_prob: Tensor) -> Tensor:
        return losses.policy_term(correction, log_prob, behaviour, proximal, advantage, **options).objective_B

    assert torch.autograd.gradcheck(objective, now.clone().requires_grad_())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_absurd_ratios_stay_finite_with_finite_gradients(correction: str) -> None:
    now = torch.tensor([500.0, -500.0, 0.0]).requires_grad_()
    behaviour, proximal = torch.tensor([-500.0, 500.0, -200.0]), torch.tensor([0.0, 0.0, 300.0])
    term = losses.policy_term(correction, now, behaviour, proximal, torch.tensor([-1.0, 1.0, 2.0]), **OPTIONS)
    (gradient,) = torch.autograd.grad(term.objective_B.sum(), now)
    assert term.objective_B.isfinite().all()
    assert gradient.isfinite().all()


def test_behaviour_weight_is_capped_and_carries_no_gradient() -> None:
    proximal = log(1.5, 9).requires_grad_()
    weight = losses.behaviour_weight(proximal, log(1, 1), cap=2.0)
    torch.testing.assert_close(weight, numbers(1.5, 2))
    assert not weight.requires_grad


def test_dual_clip_bounds_what_a_bad_action_can_cost() -> None:
    ratio = log(10, 2, 10).requires_grad_()
    objective, _ = losses.clipped_surrogate(ratio, numbers(-1, -1, 1), clip_range=0.2, dual_clip=3.0)
    torch.testing.assert_close(objective.detach(), numbers(-3, -2, 1.2))
    (gradient,) = torch.autograd.grad(objective.sum(), ratio)
    torch.testing.assert_close(gradient, numbers(0, -2, 0))


def test_interpolation_is_the_formula_of_the_versions() -> None:
    version_b, version = torch.tensor([7, 6, 4]), 7  # v_p = version, being trained: version + 1
    expected = [(version - b) / (version + 1 - b) for b in version_b.tolist()]
    alpha = losses.interpolation_alpha(version - version_b)
    torch.testing.assert_close(alpha, torch.tensor(expected))
    behaviour, now = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0]).requires_grad_()
    proximal = losses.interpolate_proximal(now, behaviour, alpha)
    torch.testing.assert_close(proximal, behaviour + alpha * (now.detach() - behaviour))
    assert proximal[0] == behaviour[0]  # fresh data: exactly the behaviour policy
    assert not proximal.requires_grad


def test_masked_items_leave_the_numerator_and_not_the_denominator() -> None:
    mean = losses.masked_mean(torch.tensor([1.0, 2.0, 300.0, 5.0]), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert mean.item() == pytest.approx(8 / 4)


def test_value_clip_takes_the_larger_of_the_two_losses() -> None:
    # old 0, clip 1. v = 3 towards the target 4: (3-4)^2 = 1 against (1-4)^2 = 9. v = -3: 49 against 25.
    value, old, target = torch.tensor([3.0, -3.0]).requires_grad_(), torch.zeros(2), torch.full((2,), 4.0)
    error = losses.value_error(value, old, target, value_clip=1.0, huber_delta=None)
    torch.testing.assert_close(error.detach(), torch.tensor([9.0, 49.0]))
    (gradient,) = torch.autograd.grad(error.sum(), value)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -14.0]))  # moved enough already; not at all


def test_value_losses() -> None:
    value, target = torch.tensor([0.5, 3.0]), torch.zeros(2)
    mse = losses.value_error(value, value, target, None, None)
    huber = losses.value_error(value, value, target, None, 1.0)
    torch.testing.assert_close(mse, torch.tensor([0.25, 9.0]))
    torch.testing.assert_close(huber, torch.tensor([0.125, 2.5]))


def test_effective_sample_size() -> None:
    assert losses.effective_sample_size(torch.full((10,), 300.0)).item() == pytest.approx(1.0)
    assert losses.effective_sample_size(torch.tensor([400.0] + [0.0] * 9)).item() == pytest.approx(0.1)
    weight = torch.tensor([1.0, 2.0, 3.0])
    assert losses.effective_sample_size(weight.log()).item() == pytest.approx(36 / (3 * 14))
    assert losses.effective_sample_size(torch.zeros(0)).item() == 0.0


def test_other_reductions_need_the_shares_of_the_actions() -> None:
    share_BE = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    evaluation = Evaluation.of(share_BE, torch.zeros(2), torch.zeros(2), torch.zeros(2, 6), terms=6)
    assert losses.reduce_log_prob(evaluation, "sum")[0].tolist() == [[3.0], [8.0]]
    assert losses.reduce_log_prob(evaluation, "mean")[0].tolist() == [[0.5], [pytest.approx(8 / 6)]]
    assert losses.reduce_log_prob(evaluation, "action")[0] is share_BE
    one_of_three = replace(evaluation, scored_share=1 / 3)
    assert losses.reduce_log_prob(one_of_three, "mean")[0].tolist() == [
        [pytest.approx(3 / 18)], [pytest.approx(8 / 18)],
    ]  # fmt: skip
    plain = Evaluation(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2, 6))
    assert losses.reduce_log_prob(plain, "sum")[0].tolist() == [[0.0], [0.0]]
    for reduction in ("mean", "action"):
        with pytest.raises(
            UserError, match=f"algo.reduction={reduction} needs a policy that gives its actions' shares"
        ):
            losses.reduce_log_prob(plain, reduction)
