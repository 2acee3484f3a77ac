"""Detour: two ways that are as good as each other, counted apart, and an expert that takes either."""

from __future__ import annotations

import pytest
import torch

from tests.envs.helpers import pool, restart

LEFT, RIGHT = "passed_left", "passed_right"


def test_the_expert_takes_either_way_by_the_episode() -> None:
    env = pool("detour", 128)
    passed = {name: torch.zeros(128, dtype=torch.bool) for name in (LEFT, RIGHT)}
    for _ in range(env.spec.max_episode_steps - 1):
        step = env.step(env.expert())
        assert not len(step.final_ids), "it never enters the column"
        for name, held in passed.items():
            held |= step.info[name]
    assert (passed[LEFT] ^ passed[RIGHT]).all(), "each episode passes on one side"
    assert step.info["success"].float().mean() > 0.95
    assert 0.3 < passed[LEFT].float().mean() < 0.7
    assert torch.equal(passed[LEFT], env.task.side > 0)


def test_the_side_is_hidden_from_the_policy() -> None:
    """Two episodes with the same start and different sides look the same."""
    env = pool("detour", 8)
    before = env.observe()
    env.task.side *= -1
    env.view.changed()
    after = env.observe()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not torch.equal(env.expert(), torch.zeros(8, 4))


def test_straight_ahead_ends_the_episode() -> None:
    env = pool("detour", 16)
    for _ in range(env.spec.max_episode_steps - 1):
        to_goal = env.task.goal - env.view.tcp_pos
        arm = (to_goal / to_goal.norm(dim=-1, keepdim=True)).clamp(-1, 1) * 0.5
        step = env.step(torch.cat([arm, torch.ones(16, 1)], 1))
        if len(step.final_ids):
            break
    assert step.terminated_N.any()
    ended = step.final_ids
    assert not step.episodes.once["success"].any()
    assert not step.episodes.once[LEFT].any()
    assert torch.equal(step.terminated_N.nonzero().squeeze(1), ended)


def test_neither_way_is_shorter() -> None:
    """In mirror images of one state the reward is the same."""
    env = pool("detour", 2)
    env.task.post[:, 0], env.task.goal[:] = 0.47, torch.tensor([0.34, 0, 0.17], dtype=torch.float64)
    tcp = env.task.view.tcp_pos.clone()
    env.task.post[0, 1], env.task.goal[0, 1] = tcp[0, 1] - 0.05, tcp[0, 1] - 0.05  # the tool is 5 cm to one side,
    env.task.post[1, 1], env.task.goal[1, 1] = tcp[0, 1] + 0.05, tcp[0, 1] + 0.05  # or to the other
    env.task.view.tcp_pos[1] = tcp[0]
    reward = torch.stack(list(env.task.rewards(env.task.success()).values())).sum(0)
    assert reward[0] == pytest.approx(reward[1].item(), abs=1e-12)
    assert 0 < reward[0] < 0.5


def test_the_side_is_resumed() -> None:
    env, other = pool("detour", 8), pool("detour", 8, seed=50)
    assert not torch.equal(env.task.side, other.task.side)
    other.load_state_dict(env.state_dict(), other.sampler)
    assert torch.equal(env.task.side, other.task.side)
    restart(other, seed=0)
    assert torch.equal(env.task.side, other.task.side), "the same seed takes the same side"
