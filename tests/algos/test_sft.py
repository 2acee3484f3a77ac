"""Imitation: it learns, its average is an average, it goes on exactly, and it validates on the same draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from embodied.algos.supervised import SFT, SFTConfig
from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies import POLICIES

SPEC = EnvSpec.of_sizes("none", state=4, privileged=2, action=2)
SIZES = {"actor_hidden": (32, 32), "critic_hidden": (8,)}
CPU = torch.device("cpu")


def make(name: str = "flow", **options: object) -> SFT:
    torch.manual_seed(0)
    entry = POLICIES[name]
    sizes = SIZES | ({"head_hidden": (32,)} if name == "flow" else {})
    return SFT(entry.build(SPEC, entry.config(**sizes)), SFTConfig(**options), seed=0, device=CPU)


def batch(num: int, seed: int = 0) -> tuple[Obs, Tensor, Tensor]:
    """Chunks that are a function of the state, all valid."""
    state = 5 + 3 * torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
    action = (0.3 * (state[:, :2] - 5)).tanh()[:, None].repeat(1, 4, 1)
    return {"state": state}, action, torch.ones(num, 4, dtype=torch.bool)


@pytest.mark.parametrize("name", ["flow", "gaussian"])
def test_the_deterministic_policy_comes_to_do_what_was_demonstrated(name: str) -> None:
    algorithm = make(name, updates=300, learning_rate=3e-3, ema_decay=0.98)
    obs, action, valid = batch(512)
    algorithm.fit_normalizer(obs)
    before = algorithm.validate(*batch(128, 1))
    for _ in range(300):
        algorithm.update(obs, action, valid)
    assert algorithm.validate(*batch(128, 1)) < 0.2 * before
    done = algorithm.average.plan({**batch(128, 1)[0], "privileged": torch.zeros(128, 2)})
    assert (done - batch(128, 1)[1]).abs().mean() < 0.1


@pytest.mark.parametrize("factor", [1e-5, 1e5])
def test_the_unit_of_the_observation_does_not_matter(factor: float) -> None:
    found = []
    for unit in (1.0, factor):
        algorithm = make(updates=100, learning_rate=3e-3, ema_decay=0.9)
        obs, action, valid = batch(512)
        obs = {"state": obs["state"] * unit}
        algorithm.fit_normalizer(obs)
        for _ in range(100):
            algorithm.update(obs, action, valid)
        found.append(algorithm.validate(obs, action, valid))
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_the_loss_is_the_mean_over_the_demonstrated_actions_of_a_batch() -> None:
    """Each counts alike, and what stands in place of missing ones has no part in it."""
    algorithm = make("gaussian")
    obs, action, _ = batch(64)
    valid = torch.arange(4) < 1 + torch.arange(64)[:, None] % 4
    error = (algorithm.policy.mean(algorithm.policy.inputs(obs)) - action).square().mean(-1)
    padded = action.masked_fill(~valid[..., None], 1e6)
    loss = algorithm.policy.imitation_loss(obs, padded, valid, algorithm.generator)
    torch.testing.assert_close(loss, error[valid].sum() / valid.sum())


def test_average_by_hand() -> None:
    algorithm = make(ema_decay=0.5, learning_rate=1e-2)
    weights = [dict(algorithm.policy.named_parameters())["denoiser.output.weight"]]
    expected, decays = weights[0].detach().clone(), (1 / 11, 2 / 12, 3 / 13)
    for decay in decays:
        algorithm.update(*batch(32))
        expected = decay * expected + (1 - decay) * weights[0].detach()
    found = dict(algorithm.average.named_parameters())["denoiser.output.weight"]
    torch.testing.assert_close(found, expected)


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    algorithm = make(updates=20, warmup=4)
    rates = []
    for _ in range(20):
        rates.append(algorithm.optimizer.param_groups[0]["lr"])
        algorithm.update(*batch(16))
    assert rates[0] == pytest.approx(1e-3 / 5)
    assert max(rates) == pytest.approx(1e-3, rel=0.15)
    assert rates[-1] < 0.01 * 1e-3
    assert rates.index(max(rates)) == 4


def test_validation_draws_the_same_noise_every_time() -> None:
    algorithm = make()
    assert algorithm.validate(*batch(64)) == algorithm.validate(*batch(64))


def test_statistics_are_those_of_the_data_and_stay() -> None:
    algorithm = make()
    obs = batch(1000)[0]
    algorithm.fit_normalizer(obs)
    normalizer = algorithm.policy.state_normalizer
    torch.testing.assert_close(normalizer.mean.float(), obs["state"].mean(0))
    torch.testing.assert_close(normalizer.var.float(), obs["state"].var(0, correction=0))
    algorithm.policy.update_normalizer({"state": torch.zeros(500, 4), "privileged": torch.ones(500, 2)})
    torch.testing.assert_close(normalizer.mean.float(), obs["state"].mean(0))
    torch.testing.assert_close(algorithm.policy.critic.normalizer.mean.float(), torch.ones(2))
    torch.testing.assert_close(algorithm.average.state_normalizer.mean.float(), obs["state"].mean(0))


def test_rates_of_the_configuration_win_when_going_on() -> None:
    first, second = make(updates=12), make(updates=12, learning_rate=5e-4, weight_decay=0.5)
    first.update(*batch(16))
    second.load_state_dict(first.state_dict())
    before, after = (algorithm.optimizer.param_groups[0] for algorithm in (first, second))
    assert after["lr"] == pytest.approx(before["lr"] / 2)
    assert after["weight_decay"] == 0.5
    for algorithm in (first, second):
        algorithm.update(*batch(16))
    assert after["lr"] == pytest.approx(before["lr"] / 2)


def test_going_on_from_a_state_is_exact() -> None:
    def advance(algorithm: SFT, count: int) -> list[float]:
        starts = torch.arange(512)
        obs, action, valid = batch(512)
        losses = []
        for _ in range(count):
            rows = algorithm.pick(starts)
            losses.append(algorithm.update({"state": obs["state"][rows]}, action[rows], valid[rows]))
        return losses

    def with_dropout() -> SFT:
        algorithm = make("gaussian", updates=12, batch_size=32)
        algorithm.policy.actor.append(nn.Dropout(0.1))
        return algorithm

    whole = with_dropout()
    expected = advance(whole, 12)
    first = with_dropout()
    assert advance(first, 5) == expected[:5]
    state = first.state_dict()
    second = with_dropout()
    second.load_state_dict(state)
    assert advance(second, 7) == expected[5:]
    for a, b in zip(whole.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="not the state of SFT"):
        make().load_state_dict({"policy": {}})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda loss: loss * torch.inf, "update 4 is not finite: loss inf, norm of the gradient"),
        (lambda loss: -loss / 0, "update 4 is not finite: loss -inf"),
        (lambda loss: loss + (loss - loss.detach()).sqrt(), "update 4 is not finite: norm of the gradient nan"),
    ],
    ids=["loss", "negative loss", "gradient alone"],
)
def test_what_is_not_finite_stops_training_before_the_step(broken: Callable[[Tensor], Tensor], message: str) -> None:
    algorithm = make()
    for _ in range(3):
        algorithm.update(*batch(8))
    before = algorithm.state_dict()
    obs, action, valid = batch(8)
    with pytest.raises(FloatingPointError, match=message):
        algorithm.descend(broken(algorithm.policy.imitation_loss(obs, action, valid, algorithm.generator)))
    after = algorithm.state_dict()
    for name in ("policy", "average"):
        assert all(torch.equal(after[name][key], value) for key, value in before[name].items())
    assert after["updates"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": 0}, "updates: got 0, allowed: at least 1"),
        ({"ema_decay": 1.0}, "ema_decay: got 1.0, allowed: at least 0 and below 1"),
        ({"validation_share": 0.0}, "validation_share: got 0.0, allowed: above 0 and at most 0.5"),
        ({"patience": 0}, "patience: got 0, allowed: at least 1 or null"),
    ],
)
def test_options_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)
