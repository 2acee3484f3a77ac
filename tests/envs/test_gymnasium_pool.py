"""The pool as a gymnasium vector env: the same as gymnasium's own in every autoreset mode, and its wrappers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from embodied.core.errors import UserError
from embodied.envs import make_pool, make_sampler
from embodied.envs.rendering.vision import find_camera
from embodied.envs.views.gymnasium_api import TaskVectorEnv

REACH = "embodied/Reach-v0"
DETOUR = "embodied/Detour-v0"
TABLETOP = "embodied/Tabletop-v0"
SEEN: dict[str, Any] = {"cameras": ["front", "wrist"], "image_size": 16}
SHORT: dict[str, Any] = {"max_episode_steps": 4}
SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


@pytest.fixture
def pool() -> Iterator[TaskVectorEnv]:
    envs = gymnasium.make_vec(REACH, num_envs=3, num_threads=1, **SHORT)
    assert isinstance(envs, TaskVectorEnv)
    yield envs
    envs.close()


def assert_equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Compare two results of ``step`` or ``reset``; rewards are float32 in the pool."""
    *arrays, infos = ours
    *expected, expected_infos = theirs
    if len(arrays) > 1:
        np.testing.assert_allclose(arrays.pop(1), expected.pop(1), rtol=1e-6)
    assert data_equivalence(tuple(arrays), tuple(expected), exact=True)
    assert infos.keys() == expected_infos.keys()
    if "final_obs" in infos:
        for mine, other in zip(infos.pop("final_obs"), expected_infos.pop("final_obs"), strict=True):
            assert data_equivalence(mine, other, exact=True)
    assert data_equivalence(infos, expected_infos, exact=True)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        (REACH, SHORT),
        (DETOUR, {"keep_out_m": 0.14, "max_episode_steps": 9}),  # episodes that fail, after different times
        (TABLETOP, SHORT),
        (TABLETOP, {**SHORT, "flat": False}),
        (TABLETOP, {**SHORT, **SEEN}),
    ],
)
def test_native_pool_equals_gymnasiums_vector_env(mode: AutoresetMode, env_id: str, options: dict[str, Any]) -> None:
    """Same seeds, masks and actions: the same arrays, infos, masks and final observations, across resets."""
    pool = gymnasium.make_vec(env_id, num_envs=3, num_threads=1, autoreset_mode=mode, **options)
    assert pool.metadata["autoreset_mode"] is pool.unwrapped.autoreset_mode is mode
    reference = SyncVectorEnv([lambda: gymnasium.make(env_id, **options) for _ in range(3)], autoreset_mode=mode)
    assert reference.observation_space == pool.observation_space
    assert reference.action_space == pool.action_space
    assert_equal(pool.reset(seed=5), reference.reset(seed=5))
    actions = np.random.default_rng(0).uniform(-1, 1, (17, 3, 4)).astype(np.float32)
    actions[:, :2, 0] = -1.0  # in detour towards the column
    ends: set[int] = set()
    terminations = 0
    for number, action in enumerate(actions):
        ours, theirs = pool.step(action), reference.step(action)
        assert_equal(ours, theirs)
        ended = ours[2] | ours[3]
        ends.add(int(ended.sum()))
        terminations += int(ours[2].sum())
        masks = [ended.copy()] if mode is DISABLED and ended.any() else []
        if number == 1:  # so that later on not all end together
            masks.append(np.array([False, True, False]))
        for mask in masks:
            seed = [7, 8, None] if number % 2 else None
            results = (envs.reset(seed=seed, options={"reset_mask": mask}) for envs in (pool, reference))
            assert_equal(*results)
    assert len(ends) > 1
    assert (terminations > 1) == (env_id == DETOUR)
    assert_equal(pool.reset(seed=[3, None, 5]), reference.reset(seed=[3, None, 5]))
    assert_equal(pool.reset(), reference.reset())
    pool.close()
    reference.close()


def test_rows_that_go_on_have_no_final_obs() -> None:
    envs = gymnasium.make_vec(REACH, num_envs=6, num_threads=1, stagger=True)
    envs.reset(seed=0)
    seen = 0
    for _ in range(40):
        observations, _, terminated, truncated, infos = envs.step(np.zeros((6, 4), np.float32))
        assert not terminated.any()
        assert ("final_obs" in infos) == truncated.any()
        for row in np.flatnonzero(truncated):
            assert not np.array_equal(infos["final_obs"][row], observations[row])
        if truncated.any() and not truncated.all():
            seen += 1
            np.testing.assert_array_equal(infos["_final_obs"], truncated)
            np.testing.assert_array_equal(infos["final_info"]["_success"], truncated)
            assert all(infos["final_obs"][row] is None for row in np.flatnonzero(~truncated))
    assert seen > 0


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_stepping_where_no_episode_runs(mode: AutoresetMode) -> None:
    envs = gymnasium.make_vec(REACH, num_envs=2, autoreset_mode=mode, render_mode="rgb_array", **SHORT)
    still = np.zeros((2, 4), np.float32)
    for call in (lambda: envs.step(still), envs.render):
        with pytest.raises(ResetNeeded, match="no episode has begun"):
            call()
    with pytest.raises(ResetNeeded, match="first reset"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(still)
    assert envs.step(still)[3].all()
    if mode is DISABLED:
        envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(ResetNeeded, match="ended in env 1"):
            envs.step(still)
    else:
        assert not envs.step(still)[3].any()


@pytest.mark.parametrize("given", ["NEXT_STEP", "NextStep", NEXT])
def test_modes_have_names(given: Any) -> None:
    assert gymnasium.make_vec(REACH, autoreset_mode=given).metadata["autoreset_mode"] is NEXT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": [1, 2]}, "got 2 seeds, needed one for each of 3 envs"),
        ({"seed": [1, 2, -1]}, "seed: got -1"),
        ({"seed": [1, 2, 0.5]}, r"seed: got 0\.5"),
        ({"options": {"mask": 1}}, "reset options: got mask, allowed: reset_mask"),
        ({"options": {"reset_mask": [True] * 3}}, "got list, needed a numpy array"),
        ({"options": {"reset_mask": np.ones(2, bool)}}, r"got bool \[2\]"),
        ({"options": {"reset_mask": np.ones(3, int)}}, r"got int64 \[3\]"),
        ({"options": {"reset_mask": np.zeros(3, bool)}}, "no env to reset"),
    ],
)
def test_bad_resets(pool: TaskVectorEnv, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pool.reset(**arguments)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((3, 5)), r"got shape \(3, 5\), needed \(3, 4\)"),
        (np.zeros((3, 2, 4)), "needed"),
        (np.full((3, 4), np.nan), "NaN"),
    ],
)
def test_bad_actions(pool: TaskVectorEnv, action: np.ndarray, message: str) -> None:
    before = pool.reset(seed=0)[0]
    with pytest.raises(ValueError, match=message):
        pool.step(action)
    np.testing.assert_array_equal(pool.reset(seed=0)[0], before)


def test_bad_modes() -> None:
    with pytest.raises(UserError, match="Did you mean 'NEXT_STEP'"):
        gymnasium.make_vec(REACH, autoreset_mode="NEXTSTEP")


def test_a_closed_env_says_so(pool: TaskVectorEnv) -> None:
    pool.close()
    pool.close()
    with pytest.raises(ClosedEnvironmentError):
        pool.reset()


def test_attributes_of_single_envs() -> None:
    pool = gymnasium.make_vec(REACH, num_envs=3, render_mode="rgb_array", width=20, height=16)
    pool.reset(seed=0)
    assert pool.get_attr("action_space") == (pool.single_action_space,) * 3
    assert pool.get_attr("render_mode") == ("rgb_array",) * 3
    assert pool.get_attr("success_m") == (0.025,) * 3
    assert [picture.shape for picture in pool.call("render")] == [(16, 20, 3)] * 3
    np.testing.assert_array_equal(pool.call("render"), pool.render())
    pool.set_attr("level", [1, 2, 3])
    pool.set_attr("owner", "me")
    assert pool.get_attr("level") == (1, 2, 3)
    assert pool.get_attr("owner") == ("me",) * 3
    with pytest.raises(AttributeError, match="nothing"):
        pool.get_attr("nothing")
    with pytest.raises(AttributeError, match="whole pool"):
        pool.call("reset")
    with pytest.raises(UserError, match="got 2 values"):
        pool.set_attr("level", [1, 2])
    for name in ("success_m", "render_mode"):
        with pytest.raises(UserError, match="give it to make_vec"):
            pool.set_attr(name, 0.1)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("copied", [lambda envs: pickle.loads(pickle.dumps(envs)), deepcopy])
def test_a_copy_goes_on_as_the_original(mode: AutoresetMode, copied: Callable[[Any], Any]) -> None:
    envs = gymnasium.make_vec(TABLETOP, num_envs=2, num_threads=1, autoreset_mode=mode, stagger=True, **SHORT, **SEEN)
    envs.reset(seed=[4, 9])
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 2, 4)).astype(np.float32)
    ended = np.zeros(2, bool)
    for action in actions:
        twin = copied(envs)
        if mode is DISABLED and ended.any():
            results = [each.reset(options={"reset_mask": ended}) for each in (twin, envs)]
            assert_equal(*results)
        ours, theirs = twin.step(action), envs.step(action)
        ended = theirs[2] | theirs[3]
        assert_equal(ours, theirs)


def test_pictures_and_words_are_those_of_the_pool() -> None:
    """Also in ``final_obs`` and ``final_info``, which belong to the episode that ended."""
    cameras = [replace(find_camera(name), width=16, height=16) for name in SEEN["cameras"]]
    pool = make_pool("tabletop", {"max_episode_steps": 3}, num_envs=4, num_threads=1, cameras=cameras)
    sampler = make_sampler(pool, 1, stagger=True, splits=("train",))
    envs = gymnasium.make_vec(TABLETOP, num_envs=4, num_threads=1, max_episode_steps=3, stagger=True, **SEEN)
    expected, (observations, infos) = pool.reset(sampler), envs.reset(seed=1)
    names = {"images.front": "images_front", "images.wrist": "images_wrist"}
    ends, changed = 0, 0
    for action in np.random.default_rng(0).uniform(-1, 1, (4, 4, 4)).astype(np.float32):
        told = [pool.spec.texts[i] for i in expected["instruction"]]
        assert infos["instruction"].tolist() == told
        assert infos["_instruction"].all()
        for key, name in names.items():
            assert observations[name].std() > 10
            np.testing.assert_array_equal(observations[name], expected[key])
        step = pool.step(torch.from_numpy(action))
        expected, (observations, _, _, truncated, infos) = step.obs, envs.step(action)
        for i, row in enumerate(step.final_ids.tolist()):
            ends, changed = ends + 1, changed + (infos["instruction"][row] != told[row])
            assert infos["final_info"]["instruction"][row] == told[row]
            assert np.any(infos["final_obs"][row]["images_wrist"] != observations["images_wrist"][row])
            for key, name in names.items():
                np.testing.assert_array_equal(infos["final_obs"][row][name], step.final_obs[key][i])
        if truncated.any():
            np.testing.assert_array_equal(infos["final_info"]["_instruction"], truncated)
            assert all(infos["final_info"]["instruction"][row] is None for row in np.flatnonzero(~truncated))
    assert ends > 4
    assert changed > 0
    envs.close()


# -- gymnasium's own wrappers ------------------------------------------------------------------------------------------


def play(envs: gymnasium.vector.VectorEnv, steps: int = 9) -> list[tuple[Any, ...]]:
    """Random steps from seed 0; envs that end are reset if nothing else resets them."""
    results: list[tuple[Any, ...]] = [envs.reset(seed=0)]
    for action in np.random.default_rng(0).uniform(-1, 1, (steps, *envs.action_space.shape)).astype(np.float32):
        results.append(envs.step(action))
        ended = results[-1][2] | results[-1][3]
        if envs.metadata["autoreset_mode"] is DISABLED and ended.any():
            envs.reset(options={"reset_mask": ended})
    return results


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_statistics_of_episodes_by_gymnasiums_wrapper(mode: AutoresetMode) -> None:
    envs = wrappers.RecordEpisodeStatistics(gymnasium.make_vec(REACH, num_envs=2, autoreset_mode=mode, **SHORT))
    results = play(envs, 13)
    ends = [infos["episode"] for *_, infos in results if "episode" in infos]
    assert len(ends) >= 2
    assert all(end["l"].tolist() == [4, 4] for end in ends)
    rewards = np.stack([result[1] for result in results[1:5]])
    np.testing.assert_allclose(ends[0]["r"], rewards.sum(0))


def test_normalised_observations_by_gymnasiums_wrapper() -> None:
    envs = wrappers.NormalizeObservation(gymnasium.make_vec(REACH, num_envs=8, autoreset_mode="NEXT_STEP", **SHORT))
    observations = play(envs, 40)[-1][0]
    assert observations in envs.observation_space
    assert np.abs(observations).max() < 10
    for mode in ("SAME_STEP", "DISABLED"):
        with pytest.raises(ValueError, match="NEXT_STEP"):
            wrappers.NormalizeObservation(gymnasium.make_vec(REACH, num_envs=2, autoreset_mode=mode))


@pytest.mark.parametrize("mode", [NEXT, DISABLED])  # the modes that gymnasium's observation wrappers support
def test_flat_observations_by_gymnasiums_wrapper(mode: AutoresetMode) -> None:
    options: dict[str, Any] = {"num_envs": 2, "autoreset_mode": mode, **SHORT}
    vector, seen = gymnasium.make_vec(REACH, **options), gymnasium.make_vec(TABLETOP, **options, **SEEN)
    flat = wrappers.FlattenObservation(gymnasium.make_vec(REACH, flat=False, **options))
    assert flat.single_observation_space.shape == vector.single_observation_space.shape
    for ours, theirs in zip(play(vector), play(flat), strict=True):
        assert_equal(ours, theirs)
    pixels = wrappers.FlattenObservation(seen)
    size = 2 * 16 * 16 * 3 + seen.single_observation_space["state"].shape[0]
    assert play(pixels)[-1][0].shape == (2, size)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_other_wrappers_of_gymnasium(mode: AutoresetMode) -> None:
    envs = gymnasium.make_vec(TABLETOP, num_envs=2, autoreset_mode=mode, **SHORT, **SEEN)
    if mode is not SAME:
        envs = wrappers.FilterObservation(envs, ["state", "images_front"])
    envs = wrappers.NormalizeReward(wrappers.ClipReward(wrappers.ClipAction(envs), 0.0, 0.01))
    *_, (observations, rewards, _, truncated, _) = play(envs, 4)
    assert observations in envs.observation_space
    assert ("images_wrist" in observations) == (mode is SAME)
    assert np.isfinite(rewards).all()
    assert truncated.all()
