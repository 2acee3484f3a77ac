"""GAE and V-trace against hand calculations, and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embodied.algos.returns import decision_reward, gae, next_value, normalize, vtrace
from embodied.core.episodes import EpisodeStats
from embodied.core.types import Fragment


def column(*values: float) -> Tensor:
    """[T, 1] float32 from one number per decision."""
    return torch.tensor(values, dtype=torch.float32)[:, None]


def fragment(
    reward_TNE: Tensor,
    value_TN: Tensor,
    bootstrap: float,
    *,
    num_steps: list[int] | None = None,
    terminated: int | None = None,
    truncated: tuple[int, float] | None = None,
) -> Fragment:
    """One env; ``terminated`` and ``truncated`` (with its V(final_obs)) name the decision that ended."""
    T, N, E = reward_TNE.shape
    ended = {name: torch.zeros(T, N, dtype=torch.bool) for name in ("terminated", "truncated")}
    final_value_TN = torch.zeros(T, N)
    if terminated is not None:
        ended["terminated"][terminated] = True
    if truncated is not None:
        ended["truncated"][truncated[0]] = True
        final_value_TN[truncated[0]] = truncated[1]
    return Fragment(
        obs={},
        chain=torch.zeros(T, N, 1, E, 1),
        log_prob_TN=torch.zeros(T, N),
        value_TN=value_TN,
        reward_TNE=reward_TNE,
        num_steps_TN=torch.full((T, N), E) if num_steps is None else torch.tensor(num_steps)[:, None],
        terminated_TN=ended["terminated"],
        truncated_TN=ended["truncated"],
        final_value_TN=final_value_TN,
        bootstrap_value_N=torch.full((N,), bootstrap),
        version_TN=torch.zeros(T, N, dtype=torch.int64),
        episodes=EpisodeStats.concatenate([]),
    )


def random_fragment(seed: int, T: int = 12, N: int = 7, E: int = 3) -> Fragment:
    """Random numbers with terminations, truncations and chunks cut short by them."""
    g = torch.Generator().manual_seed(seed)
    ended = torch.rand(T, N, generator=g)
    terminated, truncated = ended < 0.15, ended > 0.85
    cut = torch.randint(1, E + 1, (T, N), generator=g)
    num_steps = torch.where(terminated | truncated, cut, torch.full((T, N), E))
    reward = torch.randn(T, N, E, generator=g) * (torch.arange(E) < num_steps[..., None])
    return Fragment(
        obs={},
        chain=torch.zeros(T, N, 1, E, 1),
        log_prob_TN=torch.randn(T, N, generator=g),
        value_TN=torch.randn(T, N, generator=g),
        reward_TNE=reward,
        num_steps_TN=num_steps,
        terminated_TN=terminated,
        truncated_TN=truncated,
        final_value_TN=torch.randn(T, N, generator=g) * truncated,
        bootstrap_value_N=torch.randn(N, generator=g),
        version_TN=torch.zeros(T, N, dtype=torch.int64),
        episodes=EpisodeStats.concatenate([]),
    )


def test_reward_of_a_chunk_is_discounted_inside_and_ends_with_the_executed_steps() -> None:
    reward = torch.tensor([[[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]]])  # T=1, N=2, E=3
    got = decision_reward(reward, torch.tensor([[3, 2]]), gamma=0.5)
    torch.testing.assert_close(got, torch.tensor([[1 + 1 + 1.0, 1 + 1.0]]))


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5, trace 0.25. delta_2 = 3 + .5*4 - 1 = 4; delta_1 = 2 + .5*1 - 2 = .5;
    # delta_0 = 1 + .5*2 - 0 = 2. A_2 = 4; A_1 = .5 + .25*4 = 1.5; A_0 = 2 + .25*1.5 = 2.375.
    data = fragment(column(1, 2, 3)[..., None], column(0, 2, 1), bootstrap=4.0)
    advantage, target = gae(data, gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantage, column(2.375, 1.5, 4))
    torch.testing.assert_close(target, column(2.375, 3.5, 5))


def test_termination_in_the_middle_bootstraps_nothing_and_cuts_the_trace() -> None:
    # delta_1 = 2 + 0 - 2 = 0 whatever follows; A_1 = 0; A_0 = 2 + .25*0.
    data = fragment(column(1, 2, 3)[..., None], column(0, 2, 1), bootstrap=4.0, terminated=1)
    advantage, _ = gae(data, gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantage, column(2, 0, 4))


def test_truncation_bootstraps_the_value_of_the_final_observation() -> None:
    # The value that follows (1) is of the next episode: delta_1 = 2 + .5*10 - 2 = 5; A_0 = 2 + .25*5.
    data = fragment(column(1, 2, 3)[..., None], column(0, 2, 1), bootstrap=4.0, truncated=(1, 10.0))
    advantage, target = gae(data, gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantage, column(3.25, 5, 4))
    torch.testing.assert_close(target, column(3.25, 7, 5))


def test_termination_at_the_end_of_the_fragment_ignores_the_bootstrap() -> None:
    data = fragment(column(1, 2, 3)[..., None], column(0, 2, 1), bootstrap=4.0, terminated=2)
    assert next_value(data)[2].item() == 0.0


def test_chunks_discount_and_trace_per_control_step() -> None:
    # E = 2, gamma .5, lambda .5. The last chunk was cut after 1 step by a truncation with V(final) = 8.
    # R_0 = 1 + .5*2 = 2, R_1 = 4 (its second reward does not exist).
    # delta_1 = 4 + .5^1*8 - 2 = 6; delta_0 = 2 + .5^2*2 - 1 = 1.5; A_0 = 1.5 + (.25^2)*6 = 1.875.
    reward = torch.tensor([[[1.0, 2.0]], [[4.0, 99.0]]])
    data = fragment(reward, column(1, 2), bootstrap=50.0, num_steps=[2, 1], truncated=(1, 8.0))
    advantage, target = gae(data, gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantage, column(1.875, 6))
    torch.testing.assert_close(target, column(2.875, 8))


def test_lambda_one_is_the_discounted_return_whatever_the_chunking() -> None:
    """The same 6 rewards as 6 decisions of 1 step or as 2 of 3: the same Monte Carlo target of the first state."""
    rewards = torch.randn(6)
    single = fragment(rewards.view(6, 1, 1), torch.randn(6, 1), bootstrap=2.0)
    chunked = fragment(rewards.view(2, 1, 3), torch.randn(2, 1), bootstrap=2.0)
    first = [gae(data, gamma=0.9, gae_lambda=1.0)[1][0, 0] for data in (single, chunked)]
    expected = sum(0.9**i * r for i, r in enumerate(rewards.tolist())) + 0.9**6 * 2.0
    torch.testing.assert_close(torch.stack(first), torch.full((2,), expected))


def test_a_decision_that_executed_nothing_is_transparent() -> None:
    data = fragment(column(1, 0, 3)[..., None], column(0, 1, 1), bootstrap=4.0, num_steps=[1, 0, 1])
    advantage, _ = gae(data, gamma=0.5, gae_lambda=0.5)
    without, _ = gae(fragment(column(1, 3)[..., None], column(0, 1), bootstrap=4.0), gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantage[[0, 2]], without)


def test_gae_matches_its_definition_as_a_sum() -> None:
    """A_t = sum_k (prod of traces from t to k-1) delta_k, written out per env."""
    data = random_fragment(seed=3)
    gamma, lam = 0.9, 0.8
    advantage, _ = gae(data, gamma, lam)
    T, N = data.value_TN.shape
    for n in range(N):
        follows = [*data.value_TN[1:, n].tolist(), data.bootstrap_value_N[n].item()]
        for t in range(T):
            total, trace = 0.0, 1.0
            for k in range(t, T):
                steps = int(data.num_steps_TN[k, n])
                reward = sum(gamma**i * data.reward_TNE[k, n, i].item() for i in range(steps))
                terminated, truncated = bool(data.terminated_TN[k, n]), bool(data.truncated_TN[k, n])
                after = 0.0 if terminated else data.final_value_TN[k, n].item() if truncated else follows[k]
                total += trace * (reward + gamma**steps * after - data.value_TN[k, n].item())
                if terminated or truncated:
                    break
                trace *= (gamma * lam) ** steps
            assert advantage[t, n].item() == pytest.approx(total, abs=1e-4)


def test_vtrace_by_hand() -> None:
    # gamma .5, lambda 1. weights e^log_rho = (2, .5), rho_bar = 1.5, c_bar = 1: rho = (1.5, .5), c = (1, .5).
    # delta_1 = 2 + .5*4 - 1 = 3; delta_0 = 1 + .5*1 - 0 = 1.5.
    # vs_1 - V_1 = .5*3 = 1.5; vs_0 - V_0 = 1.5*1.5 + .5*1*1.5 = 3.
    # A_1 = 3; A_0 = 1 + .5*(1 + 1.5) - 0 = 2.25.
    data = fragment(column(1, 2)[..., None], column(0, 1), bootstrap=4.0)
    advantage, target, rho = vtrace(data, column(2, 0.5).log(), 0.5, 1.0, rho_bar=1.5, c_bar=1.0)
    torch.testing.assert_close(target, column(3, 2.5))
    torch.testing.assert_close(advantage, column(2.25, 3))
    torch.testing.assert_close(rho, column(1.5, 0.5))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_vtrace_on_fresh_data_is_gae(gae_lambda: float) -> None:
    data = random_fragment(seed=5)
    *got, rho = vtrace(data, torch.zeros_like(data.value_TN), 0.97, gae_lambda, rho_bar=1.0, c_bar=1.0)
    torch.testing.assert_close(rho, torch.ones_like(rho))
    torch.testing.assert_close(tuple(got), gae(data, 0.97, gae_lambda))


def test_vtrace_learns_nothing_from_decisions_that_the_policy_would_never_take() -> None:
    data = random_fragment(seed=6)
    advantage, target, rho = vtrace(data, torch.full_like(data.value_TN, -40.0), 0.97, 0.95, rho_bar=1.0, c_bar=1.0)
    torch.testing.assert_close(rho * advantage, torch.zeros_like(advantage))
    torch.testing.assert_close(target, data.value_TN)


@pytest.mark.parametrize("unit", [2.0**-40, 1e-6, 1e6])
def test_the_unit_of_the_reward_changes_no_normalised_advantage(unit: float) -> None:
    advantage = gae(random_fragment(seed=7), 0.97, 0.95)[0]
    valid = torch.rand(advantage.shape) < 0.8
    torch.testing.assert_close(normalize(advantage * unit, valid), normalize(advantage, valid))
    assert normalize(advantage, valid)[valid].std(correction=0) == pytest.approx(1.0)


def test_equal_advantages_say_nothing() -> None:
    for size in (0.0, 1e-6, 0.1, 1e6):
        rounded = size * (1 + 1e-7 * torch.randn(20, 5))
        assert not normalize(rounded, torch.ones(20, 5, dtype=torch.bool)).any()
