"""Random numbers as a pure function of (seed, episode, stream, index), and episodes that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from tests.envs.helpers import actions, pool, restart

RANDOMIZATION = {
    "friction": {"field": "geom_friction", "names": ["left_pad", "right_pad"], "range": [0.5, 1.5], "column": 0},
    "mass": {"field": "body_mass", "names": ["cube"], "range": [0.5, 2.0], "mode": "startup"},
}


def unit(seeds: np.ndarray, episodes: np.ndarray, stream: str, size: int) -> np.ndarray:
    return EpisodeRng(seeds, episodes).unit(stream, size)


def test_draws_do_not_depend_on_who_else_draws() -> None:
    seeds, episodes = np.arange(100), np.arange(100) % 7
    together = unit(seeds, episodes, "goal", 5)
    some = np.array([3, 50, 99])
    np.testing.assert_array_equal(together[some], unit(seeds[some], episodes[some], "goal", 5))
    np.testing.assert_array_equal(together[:, :2], unit(seeds, episodes, "goal", 2))


def test_draws_are_uniform_and_independent() -> None:
    n = 20000
    seeds, zeros = np.arange(n), np.zeros(n, int)
    a = unit(seeds, zeros, "a", 2)
    others = {
        "neighbouring seed": np.roll(a[:, 0], 1),
        "next index": a[:, 1],
        "next episode": unit(seeds, zeros + 1, "a", 1)[:, 0],
        "other stream": unit(seeds, zeros, "b", 1)[:, 0],
    }
    assert a.min() >= 0.0
    assert a.max() < 1.0
    histogram = np.histogram(a[:, 0], bins=20, range=(0, 1))[0]
    chi2 = ((histogram - n / 20) ** 2 / (n / 20)).sum()
    assert chi2 < 43.8  # 0.999 quantile at 19 degrees of freedom
    for name, other in others.items():
        assert abs(np.corrcoef(a[:, 0], other)[0, 1]) < 4 / np.sqrt(n), name


def test_episode_rng_shapes_and_bounds() -> None:
    rng = EpisodeRng(np.arange(1000), np.zeros(1000, int))
    box = rng.uniform("box", [0.0, -2.0], [1.0, -1.0])
    scalar = rng.uniform("angle", -0.5, 0.5)
    assert len(rng) == 1000
    assert box.shape == (1000, 2)
    assert scalar.shape == (1000,)
    assert (box >= [0.0, -2.0]).all()
    assert (box < [1.0, -1.0]).all()
    assert -0.5 <= scalar.min() < -0.49
    assert 0.49 < scalar.max() < 0.5
    with pytest.raises(UserError, match="'box' are drawn twice"):
        rng.unit("box", 2)
    assert len(rng.rows(np.arange(3)).unit("box", 2)) == 3


def _trajectory(num_envs: int, first_seed: int, watch: int, threads: int, salt: int) -> torch.Tensor:
    """Observations and rewards of the env with seed ``watch`` over two and a half episodes, [T, D]."""
    env = pool("lift", num_envs, 8, num_threads=threads, seed=first_seed, sim={"randomization": RANDOMIZATION})
    seeds = [first_seed + i for i in range(num_envs)]
    plan = actions(seeds, 20, env.spec.action_dim, salt)
    row = watch - first_seed
    plan[row] = actions([watch], 20, env.spec.action_dim)[0]
    obs, rows = restart(env), []
    rows.append(torch.cat([obs["state"][row], obs["privileged"][row], torch.zeros(1)]))
    for t in range(20):
        step = env.step(plan[:, t])
        rows.append(torch.cat([step.obs["state"][row], step.obs["privileged"][row], step.reward_NE[row]]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("num_envs", "first_seed", "threads", "salt"), [(5, 10, 1, 0), (5, 9, 2, 3), (16, 0, 1, 1), (16, 5, 2, 2)]
)
def test_an_env_is_the_same_in_any_company(num_envs: int, first_seed: int, threads: int, salt: int) -> None:
    alone = _trajectory(1, 12, 12, 1, 0)
    torch.testing.assert_close(_trajectory(num_envs, first_seed, 12, threads, salt), alone, rtol=0, atol=0)


def test_episode_k_can_be_reached_without_the_episodes_before_it() -> None:
    limit, plan = 6, actions([40, 41, 42], 18, 4)
    played, skipped = pool("pick_place", 3, limit, seed=40), pool("pick_place", 3, limit, seed=7)
    for t in range(2 * limit):
        last = played.step(plan[:, t])
    restart(skipped, 40)
    restart(skipped)
    first = restart(skipped)
    for key in first:
        torch.testing.assert_close(last.obs[key], first[key], rtol=0, atol=0)
    for t in range(2 * limit, 3 * limit):
        a, b = played.step(plan[:, t]), skipped.step(plan[:, t])
        torch.testing.assert_close(a.obs["state"], b.obs["state"], rtol=0, atol=0)
        torch.testing.assert_close(a.reward_NE, b.reward_NE, rtol=0, atol=0)


def test_episodes_and_seeds_differ() -> None:
    env = pool("reach", 8)
    firsts = torch.cat([restart(env, 0)["state"], restart(env)["state"], restart(env, 1000)["state"]])
    assert len(torch.unique(firsts, dim=0)) == 24
