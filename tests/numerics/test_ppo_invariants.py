"""What must hold of PPO whatever the task: docs/architecture.md, Mathematics. Published systems broke each once."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algos.batch import evaluate_in_pieces, merge_fragments
from embodied.algos.config import CORRECTIONS, PPOConfig
from embodied.algos.ppo import PPO
from tests.numerics.tiny_policy import TinyPolicy, make_fragment

CPU = torch.device("cpu")
ONCE: dict[str, Any] = {"epochs": 1, "num_minibatches": 1}


def ppo(policy: TinyPolicy, **options: Any) -> PPO:
    return PPO(policy, PPOConfig(**options), seed=0, device=CPU)


def parameters(policy: TinyPolicy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()


def moved(policy: TinyPolicy, scale: float = 0.05) -> TinyPolicy:
    """A newer version of the policy: its parameters a little elsewhere."""
    newer = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in newer.parameters():
            p += scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return newer


def test_with_learning_rate_zero_ratio_and_kl_never_move() -> None:
    """Also across versions whose normaliser differs: what the actor used is what the learner evaluates."""
    policy = TinyPolicy()
    before, algorithm = parameters(policy), ppo(policy, learning_rate=0.0, target_kl=1e-5)
    for version in range(5):
        metrics = algorithm.update([make_fragment(policy, seed=version, version=version)], version)
        assert metrics["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-5)
        assert metrics["train/epochs"] == PPOConfig().epochs
    assert torch.equal(parameters(policy), before)
    assert policy.count == 5 * 30


def test_skipping_the_proximal_pass_on_fresh_data_is_exact() -> None:
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=1)
    obs = {key: value.flatten(0, 1) for key, value in fragment.obs.items()}
    recomputed = evaluate_in_pieces(policy, obs, fragment.chain.flatten(0, 1), 7)
    torch.testing.assert_close(recomputed.log_prob_B, fragment.log_prob_TN.flatten(), atol=1e-5, rtol=0)


def test_the_trust_region_of_stale_data_is_around_the_weights_of_this_update() -> None:
    behaviour = TinyPolicy()
    policy = moved(behaviour)
    fragment = make_fragment(behaviour, seed=1, version=3)
    decoupled = ppo(copy.deepcopy(policy), **ONCE).update([fragment], version=5)
    coupled = ppo(copy.deepcopy(policy), correction="none", **ONCE).update([fragment], version=5)
    assert decoupled["train/ratio_first"] == pytest.approx(1.0, abs=1e-5)
    assert decoupled["train/approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(coupled["train/ratio_first"] - 1.0) > 1e-3
    assert decoupled["async/ess"] == coupled["async/ess"] < 0.999
    assert decoupled["async/staleness_mean"] == decoupled["async/staleness_max"] == 2.0


@pytest.mark.parametrize("options", [{"correction": "vtrace"}, {"correction": "none"}, {"proximal": "interpolate"}])
def test_every_correction_is_gae_ppo_on_fresh_data(options: dict[str, Any]) -> None:
    reference = TinyPolicy()
    other = copy.deepcopy(reference)
    fragment = make_fragment(reference, seed=1)
    ppo(reference).update([fragment], version=0)
    ppo(other, **options).update([fragment], version=0)
    torch.testing.assert_close(parameters(other), parameters(reference), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_gradient_of_the_whole_loss_matches_finite_differences(correction: str) -> None:
    """In float64, on stale data, through policy, value and entropy terms, along random directions."""
    behaviour = TinyPolicy().double()
    policy = moved(behaviour, scale=0.1)
    algorithm = ppo(policy, correction=correction, entropy_coef=0.01, value_loss="huber", value_clip=0.5)
    fragment = make_fragment(behaviour, seed=1)
    batch = algorithm.prepare(fragment, staleness_TN=torch.full((5, 6), 2), valid_TN=torch.ones(5, 6, dtype=torch.bool))
    with torch.no_grad():  # away from p = current, where min and clip have their kinks
        for p in policy.parameters():
            p += 0.02 * torch.randn_like(p)
    weights = list(policy.parameters())
    gradients = torch.autograd.grad(algorithm.loss(batch).total, weights)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
        ends = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                for p, d in zip(weights, directions, strict=True):
                    p += step * d
            ends.append(algorithm.loss(batch).total.item())
        with torch.no_grad():
            for p, d in zip(weights, directions, strict=True):
                p += 1e-6 * d
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_items_too_stale_leave_the_numerator_only() -> None:
    """Masking 10 of 30 decisions gives 20/30 of the loss and gradient of those that stay, and they alone count."""
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=1)
    fragment.version_TN[:, :2] = -3
    algorithm = ppo(policy, normalize_advantage=False)
    staleness_TN = 0 - fragment.version_TN
    masked = algorithm.prepare(fragment, staleness_TN, staleness_TN <= 2)
    kept = masked.select(torch.nonzero(masked.column("weight")).squeeze(1))
    assert (len(masked.chain), len(kept.chain)) == (30, 20)
    gradients = []
    for batch in (masked, kept):
        loss = algorithm.loss(batch)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss.total, list(policy.parameters()))]))
    torch.testing.assert_close(gradients[0], gradients[1] * 20 / 30)

    metrics = ppo(policy, max_staleness=2).update([fragment], version=0)
    assert metrics["async/dropped"] == 10.0
    assert metrics["async/staleness_max"] == 3.0
    assert metrics["async/staleness_mean"] == pytest.approx(1.0)


def test_masked_advantages_do_not_enter_the_normalisation() -> None:
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=1)
    valid_TN = torch.ones(5, 6, dtype=torch.bool)
    valid_TN[:, 0] = False
    fragment.reward_TNE[:, 0] = 1e6
    batch = ppo(policy).prepare(fragment, torch.zeros(5, 6, dtype=torch.int64), valid_TN)
    advantage = batch.column("advantage")[valid_TN.flatten()]
    assert advantage.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert advantage.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)


def test_the_order_of_arrival_of_fragments_changes_nothing() -> None:
    """Threads deliver in any order; parameters must not depend on it, to the last bit."""
    first = TinyPolicy()
    second = copy.deepcopy(first)
    fragments = [replace(make_fragment(first, seed=i), worker=i // 2, group=i % 2) for i in range(4)]
    ppo(first).update(fragments, version=0)
    ppo(second).update([fragments[i] for i in (2, 0, 3, 1)], version=0)
    assert torch.equal(parameters(first), parameters(second))


def test_merged_fragments_keep_each_env_together() -> None:
    policy = TinyPolicy()
    parts = [make_fragment(policy, seed=i, worker=1 - i, N=3) for i in range(2)]
    merged = merge_fragments(parts)
    torch.testing.assert_close(merged.obs["state"], torch.cat([parts[1].obs["state"], parts[0].obs["state"]], dim=1))
    torch.testing.assert_close(merged.bootstrap_value_N[:3], parts[1].bootstrap_value_N)
    assert merged.num_env_steps == sum(part.num_env_steps for part in parts)


def test_vtrace_advantages_stay_nothing_where_the_weight_is_nothing() -> None:
    """Normalising must not give back what the importance weight took away."""
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=0)
    unlikely = torch.zeros_like(fragment.value_TN, dtype=torch.bool)
    unlikely[:, ::2] = True  # drawn by a behaviour under which these were e^18 times likelier
    stale = replace(fragment, log_prob_TN=fragment.log_prob_TN + 18.0 * unlikely)
    valid = torch.ones_like(unlikely)
    batch = ppo(policy, correction="vtrace").prepare(stale, torch.ones_like(fragment.version_TN), valid)
    advantage_B = batch.column("advantage")
    assert advantage_B[unlikely.flatten()].abs().max() < 1e-5
    assert advantage_B[~unlikely.flatten()].abs().min() > 1e-3
