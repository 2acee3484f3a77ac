"""The family envpool, on the real EnvPool: autoreset, ends, seeds, success, spaces and bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied import eval as eval_command
from embodied import train
from embodied.core.episodes import EpisodePlans, PlanList
from embodied.core.errors import UserError
from embodied.core.spec import Box, CameraSpec, Discrete
from embodied.envs import FAMILIES, make_sampler
from embodied.envs.adapters.config import EnvpoolConfig, EnvpoolTaskConfig
from embodied.envs.adapters.envpool.pool import EnvpoolEnv, envpool_seeds
from embodied.envs.checks.conformance import check_env, run_checks
from embodied.envs.episodes.sampler import first_episodes
from tests.commands.helpers import run

envpool = pytest.importorskip("envpool", reason="needs EnvPool: pip install -c constraints.txt -e '.[envpool]'")


def make(id: str, num_envs: int = 3, cameras: Sequence[CameraSpec] = (), **options: Any) -> EnvpoolEnv:
    family, task = FAMILIES["envpool"].build(), EnvpoolTaskConfig(**options)
    env = family.make(id, task, num_envs=num_envs, num_threads=2, sim=EnvpoolConfig(), cameras=cameras)
    assert isinstance(env, EnvpoolEnv)
    return env


def spec(id: str, cameras: Sequence[CameraSpec] = (), **options: Any) -> Any:
    return FAMILIES["envpool"].build().spec(id, EnvpoolTaskConfig(**options), cameras)


pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")  # of EnvPool's own spaces


@pytest.mark.parametrize(
    ("id", "steps"),
    [
        ("HalfCheetah-v5", 6),
        ("CartPole-v1", 30),
        ("FetchPickAndPlaceDense-v1", 6),
        ("Hopper-v5", 40),
        ("Maze-v0", 20),
        ("LunarLander-v3", 20),
        ("Go1JoystickFlatTerrain-v1", 6),
    ],
)
def test_it_keeps_the_contract_of_an_environment(id: str, steps: int) -> None:
    check_env(lambda num_envs: make(id, num_envs, max_episode_steps=steps))


def test_masks_are_those_of_envpool() -> None:
    """``TSP-v1`` forbids cities that were visited, and ends when all were."""
    env = make("TSP-v1", 8)
    assert env.spec.action_mask
    assert "action_mask" not in [term.name for term in env.spec.state]
    plans = first_episodes(env.spec, 8, seed=5)
    peer = envpool.make_gymnasium("TSP-v1", num_envs=8, num_threads=1, seed=envpool_seeds(plans).tolist())
    obs = env.reset(make_sampler(env, seed=5))
    theirs, _ = peer.reset()
    for t in range(20):
        assert np.array_equal(obs["action_mask"], theirs["action_mask"])
        assert obs["action_mask"].sum(-1).tolist() == [20 - t] * 8
        action = torch.multinomial(obs["action_mask"].float(), 1, generator=torch.Generator().manual_seed(t))
        step = env.step(action)
        theirs, _, terminated, _, _ = peer.step(action[:, 0].numpy())
        assert step.terminated_N.tolist() == terminated.tolist() == [t == 19] * 8
        obs = step.obs
    assert not theirs["action_mask"].any()
    assert step.final_obs["action_mask"].all()  # no choice is left after the end, so all are allowed


def test_rewards_ends_and_states_are_those_of_envpool() -> None:
    """EnvPool shows the last state, and resets at the next step; here both are in one step."""
    env = make("HalfCheetah-v5", 2, max_episode_steps=4)
    plans = first_episodes(env.spec, 2, seed=5)
    peer = envpool.make_gymnasium(
        "HalfCheetah-v5", num_envs=2, num_threads=1, seed=envpool_seeds(plans).tolist(), max_episode_steps=4
    )
    obs = env.reset(make_sampler(env, seed=5))
    theirs, _ = peer.reset()
    actions = torch.rand(9, 2, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for t, action in enumerate(actions):
        np.testing.assert_allclose(obs["state"], theirs, atol=1e-6)
        step = env.step(action)
        theirs, reward, terminated, truncated, _ = peer.step(action.numpy())
        np.testing.assert_allclose(step.reward_N, reward, atol=1e-6)
        assert step.truncated_N.tolist() == truncated.tolist() == [(t + 1) % 4 == 0] * 2
        assert not terminated.any()
        assert not step.terminated_N.any()
        if truncated.any():
            np.testing.assert_allclose(step.final_obs["state"], theirs, atol=1e-6)
            theirs, *_ = peer.step(action.numpy())  # its action is ignored: this is the reset
        obs = step.obs


def test_a_fallen_pole_terminates_and_a_chunk_ends_with_it() -> None:
    env = make("CartPole-v1", 4)
    env.reset(make_sampler(env))
    step = env.step(torch.zeros(4, 20, 1, dtype=torch.int64))  # pushed to one side, all fall within 12 steps
    assert step.terminated_N.all()
    assert not step.truncated_N.any()
    assert step.num_steps_N.tolist() == step.episodes.length_M.tolist() == step.reward_N.tolist()
    assert step.num_steps_N.max() < 13
    assert (step.final_obs["state"][:, 2].abs() > 0.2).all()
    assert (step.obs["state"].abs() < 0.06).all()


def test_a_failure_in_the_step_of_the_time_limit_is_a_termination() -> None:
    """EnvPool itself calls it a truncation, whose value would be bootstrapped."""

    def last_step(limit: int) -> tuple[int, bool, bool]:
        env = make("CartPole-v1", 1, max_episode_steps=limit)
        env.reset(make_sampler(env, seed=2))
        step = env.step(torch.zeros(1, limit, 1, dtype=torch.int64))
        return int(step.num_steps_N), bool(step.terminated_N), bool(step.truncated_N)

    falls, *_ = last_step(100)
    assert last_step(falls) == (falls, True, False)
    assert last_step(falls - 1) == (falls - 1, False, True)


def test_an_evaluation_has_the_same_episodes_again_with_any_number_of_envs() -> None:
    def first_states(num_envs: int) -> dict[int, list[float]]:
        env = make("CartPole-v1", num_envs)
        plans = first_episodes(env.spec, 5, seed=3)
        found: dict[int, list[float]] = {}
        for _ in range(2):  # the second time on the same env
            obs, done = env.reset(PlanList(plans, num_envs)), 0
            while done < 5:
                for row in range(num_envs):
                    if env.steps_made_N()[row] == 0 and not env.plans.filler_n[row]:
                        state = obs["state"][row].tolist()
                        assert found.setdefault(int(env.plans.seed_n[row]), state) == state
                step = env.step(torch.zeros(num_envs, 1, dtype=torch.int64))
                obs, done = step.obs, done + len(step.episodes.counted())
        return found

    alone = first_states(1)
    assert len({tuple(state) for state in alone.values()}) == 5
    assert first_states(2) == first_states(5) == alone


def test_a_later_episode_of_a_seed_can_be_played_alone() -> None:
    plan = EpisodePlans(*(np.array([value]) for value in (7, 3, 0, 0, 9, False)))
    env, again = (make("HalfCheetah-v5", 1, max_episode_steps=9) for _ in range(2))
    env.reset(make_sampler(env, seed=7))
    for _ in range(3):
        step = env.step(torch.zeros(1, 9, 6))
    assert torch.equal(again.reset(PlanList(plan, 1))["state"], step.obs["state"])


def test_goals_are_named_parts_of_the_state_and_success_is_envpools() -> None:
    env = make("FetchReachDense-v4", 8)
    assert [(term.name, term.size) for term in env.spec.state] == [
        ("observation", 10), ("achieved_goal", 3), ("desired_goal", 3),
    ]  # fmt: skip
    assert env.spec.control_dt_s == 0.04
    obs = env.reset(make_sampler(env))
    for _ in range(env.spec.max_episode_steps):
        towards = (obs["state"][:, 13:16] - obs["state"][:, 10:13]) * 10
        step = env.step(torch.cat([towards, torch.zeros(8, 1)], -1))
        obs = step.obs
    assert step.truncated_N.all()
    assert step.episodes.success_at_end_M.all()
    assert step.info["success"].all()


def test_spaces() -> None:
    cheetah, pendulum, pole = (spec(id) for id in ("HalfCheetah-v5", "Pendulum-v1", "CartPole-v1"))
    assert isinstance(cheetah.action, Box)
    assert [spec(id).control_dt_s for id in ("Walker2d-v5", "Pusher-v5")] == [0.008, 0.05]
    assert (cheetah.state_dim, cheetah.action_dim, cheetah.max_episode_steps) == (17, 6, 1000)
    assert (cheetah.control_dt_s, cheetah.outcomes) == (0.05, ())
    assert pendulum.action.terms[0].scale == 2.0
    assert isinstance(pole.action, Discrete)
    assert pole.action.n == 2
    walker = spec("Go1JoystickFlatTerrain-v1")
    assert (walker.state_dim, walker.privileged_dim, walker.control_dt_s) == (48, 123, 0.02)
    assert spec("MetaWorld/DrawerOpen-v3").has_success
    assert spec("HalfCheetah-v5", options={"exclude_current_positions_from_observation": False}).state_dim == 18


def test_stacked_frames_are_cameras_and_the_newest_is_the_first() -> None:
    cameras = (CameraSpec("obs", 84, 84), CameraSpec.square("obs_3", 32), CameraSpec("obs_1", 84, 84))
    env = make("Pong-v5", 2, cameras=cameras, max_episode_steps=6)
    plans = first_episodes(env.spec, 2, seed=0)
    peer = envpool.make_gymnasium("Pong-v5", num_envs=2, num_threads=1, seed=envpool_seeds(plans).tolist())
    obs = env.reset(make_sampler(env))
    theirs, _ = peer.reset()
    assert [term.name for term in env.spec.state] == ["time"]
    for t in range(4):
        for name, index in (("obs", 3), ("obs_1", 2)):
            assert np.array_equal(obs[f"images.{name}"], np.repeat(theirs[:, index, :, :, None], 3, -1))
        assert obs["images.obs_3"].shape == (2, 32, 32, 3)
        assert obs["state"].flatten().tolist() == pytest.approx([t / 6] * 2)
        obs = env.step(torch.full((2, 1), 2)).obs
        theirs, *_ = peer.step(np.full(2, 2, np.int32))
    assert not torch.equal(obs["images.obs"], obs["images.obs_1"])


@pytest.mark.parametrize("gray", [True, False])
def test_pixels_keep_the_contract_and_are_drawn_for_people(gray: bool) -> None:
    def make_one(num_envs: int) -> EnvpoolEnv:
        camera = CameraSpec.square("obs", 84)
        return make("Pong-v5", num_envs, cameras=(camera,), max_episode_steps=6, options={"gray_scale": gray})

    found = {result.name: result for result in run_checks(make_one, resets=60)}
    assert not [result for result in found.values() if not result.passed]
    assert found["rendering"].why == ""


def test_what_envpool_draws_is_rendered_and_mujoco_is_not_claimed() -> None:
    assert make("HalfCheetah-v5").film is None  # its OpenGL would end the process
    env = make("CartPole-v1", 2)
    env.reset(make_sampler(env))
    frames = env.film(64, 48)()
    assert frames.shape == (2, 48, 64, 3)
    assert frames.min() < frames.max()
    assert [*env.instruction_texts] == ["CartPole"] * 2


def test_cameras_that_there_are_not_are_refused() -> None:
    obs, front = CameraSpec.square("obs", 84), CameraSpec.square("front", 84)
    with pytest.raises(UserError, match="HalfCheetah-v5 has no cameras: choose a policy that gets a state vector"):
        spec("HalfCheetah-v5", cameras=(obs,))
    with pytest.raises(UserError, match=r"unknown camera of task envpool/Pong-v5 'front'.* obs, obs_1, obs_2, obs_3"):
        spec("Pong-v5", cameras=(front,))
    with pytest.raises(UserError, match=r"images of 4 channels in 1 frames \(obs: uint8 \[72, 96, 4\]\)"):
        spec("gfootball/academy_3_vs_1_with_keeper-v1", cameras=(obs,))


def test_actions_are_scaled_to_the_limits_of_envpool() -> None:
    env, low = make("Pendulum-v1", 1), torch.full((1, 1), -1.0)
    plans = first_episodes(env.spec, 1, seed=0)
    peer = envpool.make_gymnasium("Pendulum-v1", num_envs=1, num_threads=1, seed=envpool_seeds(plans).tolist())
    env.reset(make_sampler(env))
    peer.reset()
    np.testing.assert_allclose(env.step(low).obs["state"], peer.step(np.full((1, 1), -2.0, np.float32))[0], atol=1e-6)


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("HalfCheeta-v5", {}, "EnvPool has .* environments, none with this name. Nearest: envpool/HalfCheetah-v5"),
        ("Pong-v5", {}, r"images alone: choose .*, policy=categorical policy.cameras=\[obs,obs_1,"),
        ("Taxi-v3", {"options": {"seed": 3}}, "unknown option of task=envpool/Taxi-v3 'seed'"),
        ("Jumanji/Tetris-v0", {}, "supported: a vector of real numbers"),
        ("LqrLqr62-v1", {}, "actions without limits"),
        ("CliffWalking-v1", {}, "has no time limit in EnvPool: give task.max_episode_steps"),
        ("HalfCheetah-v5", {"options": {"frame_skp": 3}}, "Did you mean 'frame_skip'?"),
        ("HalfCheetah-v5", {"options": {"frame_skip": "a"}}, "task.options.frame_skip: got 'a', allowed: int, such as"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(id, **options)


def test_without_envpool_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    outcome = run(train.main, ["task=envpool/HalfCheetah-v5"])
    assert outcome.code == 2
    assert outcome.stderr.splitlines() == [
        "error: task=envpool/... needs EnvPool, which is not installed: pip install -c constraints.txt -e '.[envpool]'"
    ]


def test_a_run_trains_and_its_evaluation_repeats_exactly(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["task=envpool/CartPole-v1", "policy=categorical", "num_envs=8", "total_steps=4000", "eval_episodes=8"]
    words += ["runtime=sync", "runtime.decisions=32", "runtime.eval_every=0", f"out={out}"]
    outcome = run(train.main, [*words, "runtime.learner_threads=1", "runtime.actor_threads=1", "runtime.sim_threads=1"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["eval"]["return_mean"] > 20
    assert not [key for key in outcome.result["eval"] if "success" in key]
    results = [run(eval_command.main, [f"run={out}", "episodes=8", "seed=0"]).result for _ in range(2)]
    assert results[0] == results[1]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["rollout/return_mean"] > 0
