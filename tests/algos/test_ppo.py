"""How the PPO learner behaves: minibatches, resume, bad input."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from embodied.algos import ALGORITHMS
from embodied.algos.batch import Batch
from embodied.algos.config import CORRECTIONS, PPOConfig
from embodied.algos.losses import MinibatchLoss
from embodied.algos.ppo import PPO
from embodied.core.algorithm import Algorithm
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.types import Evaluation, Fragment, Obs
from tests.numerics.tiny_policy import TinyPolicy, make_fragment

CPU = torch.device("cpu")
KEYS = {
    *(f"train/{name}" for name in ("policy_loss", "value_loss", "approx_kl", "clip_fraction", "entropy", "grad_norm")),
    *(f"train/{name}" for name in ("learning_rate", "explained_variance", "epochs", "ratio_first")),
    *(f"async/{name}" for name in ("staleness_mean", "staleness_max", "dropped", "ess")),
}


def ppo(policy: TinyPolicy, *, seed: int = 0, **options: Any) -> PPO:
    return PPO(policy, PPOConfig(**options), seed=seed, device=CPU)


def parameters(policy: TinyPolicy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()


def test_the_tensors_of_a_batch_are_arguments_of_recorded_kernels() -> None:
    batch = Batch({"state": torch.ones(2, 3)}, torch.ones(2, 1), torch.ones(8, 2), torch.ones(2), None, torch.ones(2))
    leaves, structure = tree_flatten(((False, batch), {}))
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == 5
    (_, again), _ = tree_unflatten(leaves, structure)
    assert again.obs["state"] is batch.obs["state"]
    assert again.reference is None


class Recorder(TinyPolicy):
    """Remembers which rows each minibatch had, by their first state number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        if torch.is_grad_enabled():
            self.seen.append(obs["state"][:, 0].clone())
        return super().evaluate(obs, chain)


def test_it_is_registered_and_satisfies_the_protocols() -> None:
    entry = ALGORITHMS["ppo"]
    policy = TinyPolicy()
    assert isinstance(policy, Policy)
    algorithm = entry.build(policy, entry.config(), seed=0, device=CPU)  # type: ignore[call-arg]
    assert isinstance(algorithm, Algorithm)
    assert set(algorithm.update([make_fragment(policy, seed=0)], 0)) == KEYS


def test_every_epoch_sees_every_decision_once_in_a_new_order() -> None:
    policy = Recorder()
    fragment = make_fragment(policy, seed=0, T=5, N=6)  # 30 is not divisible by 4
    policy.seen.clear()
    ppo(policy, epochs=3, num_minibatches=4).update([fragment], 0)
    assert sorted(len(rows) for rows in policy.seen) == [7] * 6 + [8] * 6
    epochs = [torch.cat(policy.seen[4 * i : 4 * i + 4]) for i in range(3)]
    everything = fragment.obs["state"][..., 0].flatten().sort().values
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, everything)
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])


def test_more_minibatches_than_decisions_are_as_many_as_decisions() -> None:
    policy = Recorder()
    fragment = make_fragment(policy, seed=0, T=1, N=3)
    policy.seen.clear()
    ppo(policy, epochs=1, num_minibatches=8).update([fragment], 0)
    assert [len(rows) for rows in policy.seen] == [1, 1, 1]


def test_only_the_existing_observations_reach_the_policy() -> None:
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=0)
    fragment.obs["privileged"] = torch.zeros(5, 6, 2)
    with pytest.raises(ValueError, match="observation keys"):
        ppo(policy).update([fragment, make_fragment(policy, seed=1)], 0)
    with pytest.raises(ValueError, match="at least one fragment"):
        ppo(policy).update([], 0)


@pytest.mark.parametrize("options", [{}, {"schedule": "adaptive", "critic_learning_rate": 1e-3}])
def test_resume_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two updates, and update, save, load, update, agree in every bit of parameters, buffers and metrics."""
    straight = TinyPolicy()
    stopped = copy.deepcopy(straight)
    fragments = [make_fragment(straight, seed=i, version=i) for i in range(2)]
    algorithm = ppo(straight, **options)
    algorithm.update(fragments[:1], 0)
    expected = algorithm.update(fragments[1:], 1)

    before = ppo(stopped, **options)
    before.update(fragments[:1], 0)
    torch.save({"policy": stopped.state_dict(), "algorithm": before.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = TinyPolicy(seed=99)
    resumed.load_state_dict(saved["policy"])
    after = ppo(resumed, seed=99, **options)
    after.load_state_dict(saved["algorithm"])
    assert after.update(fragments[1:], 1) == expected
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_saved_state_does_not_change_while_training_goes_on() -> None:
    policy = TinyPolicy()
    algorithm = ppo(policy)
    algorithm.update([make_fragment(policy, seed=0)], 0)
    saved = algorithm.state_dict()
    moment = saved["optimizer"]["state"][0]["exp_avg"].clone()
    algorithm.update([make_fragment(policy, seed=1, version=1)], 1)
    assert torch.equal(saved["optimizer"]["state"][0]["exp_avg"], moment)


@pytest.mark.parametrize("state", [{}, {"optimizer": {"state": {}, "param_groups": []}, "generator": torch.zeros(3)}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not the state of a PPO"):
        ppo(TinyPolicy()).load_state_dict(state)


def test_kl_early_stop_ends_the_epochs() -> None:
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=0)
    free = ppo(copy.deepcopy(policy), learning_rate=0.01, epochs=8).update([fragment], 0)
    stopped = ppo(policy, learning_rate=0.01, epochs=8, target_kl=0.01).update([fragment], 0)
    assert free["train/epochs"] == 8.0
    assert 1.0 <= stopped["train/epochs"] < 8.0
    assert stopped["train/approx_kl"] < free["train/approx_kl"]


@pytest.mark.parametrize("target_kl", [None, 0.01])
def test_minibatches_in_which_no_decision_measures_the_kl_do_not_count_in_its_mean(target_kl: float | None) -> None:
    """The KL is measured in 256 of 1,024 decisions; minibatches of four often have none of them."""

    class Watched(PPO):
        def loss(self, batch: Batch) -> MinibatchLoss:
            loss = super().loss(batch)
            if batch.column("kl_weight").any():
                seen.append(float(loss.statistics[2]))
            return loss

    policy, seen = TinyPolicy(), []
    config = PPOConfig(learning_rate=3e-4, schedule="fixed", epochs=2, num_minibatches=256, target_kl=target_kl)
    metrics = Watched(policy, config, seed=0, device=CPU).update([make_fragment(policy, seed=0, T=4, N=256)], 0)
    assert 100 < len(seen) / metrics["train/epochs"] < 200
    assert metrics["train/approx_kl"] == pytest.approx(sum(seen) / len(seen), rel=1e-4)


def test_only_the_critic_learns_while_it_warms_up() -> None:
    policy = TinyPolicy()
    names = [name for name, _ in policy.named_parameters()]
    assert any(name.startswith("critic.") for name in names), names
    algorithm = ppo(policy, critic_warmup=2, learning_rate=1e-2)
    before = copy.deepcopy(policy.state_dict())
    for version in range(2):
        algorithm.update([make_fragment(policy, seed=version, version=version)], version)
    for name, value in policy.named_parameters():
        assert torch.equal(value, before[name]) != name.startswith("critic."), name
    assert algorithm.optimizer.param_groups[0]["lr"] == 1e-2, "no KL to adapt the rate to"
    algorithm.update([make_fragment(policy, seed=2, version=2)], 2)
    moved = [name for name, value in policy.named_parameters() if not torch.equal(value, before[name])]
    assert moved == names


def test_the_first_update_after_the_warm_up_is_within_the_trust_region() -> None:
    """The initial rate would move the policy by more than its limit before the schedule could lower it."""
    kl = {}
    for warmup in (0, 2):
        policy = TinyPolicy()
        algorithm = ppo(policy, critic_warmup=warmup, learning_rate=0.1, desired_kl=0.03, target_kl=None)
        for version in range(3):
            metrics = algorithm.update([make_fragment(policy, seed=version, version=version)], version)
            kl[warmup, version] = metrics["train/approx_kl"]
    assert kl[0, 0] > 10 * 0.03
    assert 0 < kl[2, 2] < 2 * 0.03


def test_the_reference_holds_the_policy_back_and_is_saved() -> None:
    """With a heavy penalty the KL from the policy that training began with stays smaller."""
    distance = {}
    for coef in (0.0, 10.0):
        policy, start = TinyPolicy(), TinyPolicy()
        algorithm = ppo(policy, reference_kl_coef=coef, learning_rate=3e-3, schedule="fixed")
        for version in range(20):
            algorithm.update([make_fragment(policy, seed=version, version=version)], version)
        fragment = make_fragment(policy, seed=99, N=200)
        obs, chain = {"state": fragment.obs["state"].flatten(0, 1)}, fragment.chain.flatten(0, 1)
        with torch.no_grad():
            away = policy.evaluate(obs, chain).log_prob_B - start.evaluate(obs, chain).log_prob_B
        distance[coef] = float(away.mean())
    assert 0 < distance[10.0] < 0.5 * distance[0.0], distance
    assert algorithm.reference is not None
    again = ppo(TinyPolicy(), reference_kl_coef=10.0)
    with torch.no_grad():
        for parameter in again.reference.parameters():  # type: ignore[union-attr]
            parameter.add_(1.0)
    again.load_state_dict(algorithm.state_dict())
    for a, b in zip(again.reference.parameters(), algorithm.reference.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(a, b)


def test_the_reference_changes_nothing_at_the_first_step() -> None:
    gradients = []
    for coef in (0.0, 10.0):
        policy = TinyPolicy()
        algorithm = ppo(policy, reference_kl_coef=coef)
        fragment = make_fragment(policy, seed=0)
        staleness = torch.zeros_like(fragment.version_TN)
        batch = algorithm.prepare(fragment, staleness, torch.ones_like(fragment.terminated_TN))
        algorithm.loss(batch).total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)


def test_frozen_parameters_stay() -> None:
    policy = TinyPolicy()
    policy.log_std.requires_grad_(False)
    ppo(policy, learning_rate=0.1).update([make_fragment(policy, seed=0)], 0)
    assert torch.equal(policy.log_std, TinyPolicy().log_std)


def test_gradients_are_clipped_to_the_norm_and_reported_unclipped() -> None:
    policy = TinyPolicy()
    metrics = ppo(policy, max_grad_norm=0.1).update([make_fragment(policy, seed=0)], 0)
    norm = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.1, rel=1e-3)
    assert metrics["train/grad_norm"] > 0.1


def test_a_batch_that_is_all_too_old_changes_no_weight() -> None:
    policy = TinyPolicy()
    before = parameters(policy)
    metrics = ppo(policy, max_staleness=1).update([make_fragment(policy, seed=0, version=0)], 5)
    assert torch.equal(parameters(policy), before)
    assert metrics["async/dropped"] == 30.0
    assert metrics["train/epochs"] == 0.0
    assert set(metrics) == KEYS


def test_decisions_that_executed_nothing_are_masked_but_not_counted_as_dropped() -> None:
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=0)
    fragment.num_steps_TN[:, 0] = 0
    fragment.chain[:, 0] = 1e3  # nonsense that nobody executed
    metrics = ppo(policy).update([fragment], 0)
    assert metrics["async/dropped"] == 0.0
    assert metrics["train/approx_kl"] < 0.1


def test_a_loss_that_is_not_finite_is_an_error_before_anything_is_published() -> None:
    policy = TinyPolicy()
    fragment = make_fragment(policy, seed=0)
    fragment.reward_TNE[0, 0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="train/policy_loss=nan"):
        ppo(policy).update([fragment], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "decopled"}, "correction: got 'decopled', allowed: 'decoupled', "),
        ({"correction": "decopled"}, "Did you mean 'decoupled'?"),
        ({"value_loss": "l1"}, "value_loss: got 'l1', allowed: 'mse' or 'huber'"),
        ({"gamma": 1.5}, "gamma: got 1.5, allowed: at least 0 and at most 1"),
        ({"epochs": 0}, "epochs: got 0, allowed: at least 1"),
        ({"clip_range": 0.0}, "clip_range: got 0.0, allowed: above 0"),
        ({"learning_rate": -1.0}, "learning_rate: got -1.0, allowed: at least 0"),
        ({"dual_clip": 0.5}, "dual_clip: got 0.5, allowed: above 1 or null"),
        ({"max_staleness": -1}, "max_staleness: got -1, allowed: at least 0 or null"),
        ({"gamma": float("nan")}, "gamma: got nan, allowed: a finite number"),
        ({"proximal": "interpolate", "correction": "vtrace"}, "needs correction=decoupled"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        PPOConfig(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_it_learns_a_continuous_bandit(correction: str) -> None:
    """Reward is minus the squared distance of each action to 0.3 * state, and every decision ends the episode."""
    policy = TinyPolicy()
    algorithm = ppo(policy, learning_rate=5e-3, gamma=1.0, correction=correction, target_kl=0.1)

    def collect(version: int) -> Fragment:
        fragment = make_fragment(policy, seed=version, version=version, T=8, N=32)
        return replace(fragment, terminated_TN=torch.ones(8, 32, dtype=torch.bool))

    first = collect(0).reward_TNE.mean().item()
    for version in range(40):
        algorithm.update([collect(version)], version)
    last = collect(1000).reward_TNE.mean().item()
    assert last > 0.25 * first, f"mean reward went from {first:.3f} to {last:.3f} only"


def test_the_average_follows_the_weights_and_is_what_is_deployed() -> None:
    policy = TinyPolicy()
    algorithm = ppo(policy, ema_decay=0.5)
    assert algorithm.deployed is not policy
    expected = parameters(policy)
    for version in range(4):
        algorithm.update([make_fragment(policy, seed=version, version=version)], version)
        decay = min(0.5, (version + 1) / (version + 10))
        expected = decay * expected + (1 - decay) * parameters(policy)
    assert isinstance(algorithm.deployed, TinyPolicy)
    torch.testing.assert_close(parameters(algorithm.deployed), expected)
    torch.testing.assert_close(algorithm.deployed.mean, policy.mean)
    assert ppo(TinyPolicy()).deployed is not None


def test_a_resumed_average_goes_on_exactly() -> None:
    fragments = [make_fragment(TinyPolicy(), seed=version, version=version) for version in range(4)]
    whole, first = ppo(TinyPolicy(), ema_decay=0.9), ppo(TinyPolicy(), ema_decay=0.9)
    for version, fragment in enumerate(fragments):
        whole.update([fragment], version)
    for version in range(2):
        first.update([fragments[version]], version)
    second = ppo(TinyPolicy(seed=5), ema_decay=0.9)
    second.deployed.load_state_dict(first.deployed.state_dict())
    second.load_state_dict(first.state_dict())
    for version in range(2, 4):
        second.update([fragments[version]], version)
    for mine, theirs in ((second.policy, whole.policy), (second.deployed, whole.deployed)):
        assert isinstance(mine, TinyPolicy)
        assert isinstance(theirs, TinyPolicy)
        torch.testing.assert_close(parameters(mine), parameters(theirs), atol=0, rtol=0)
