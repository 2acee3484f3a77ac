"""The family gym: vector environments that step all environments together."""

from __future__ import annotations

import pytest
import torch

from embodied.core.env import VecEnv
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec
from embodied.envs.adapters.gym import family as gym
from embodied.envs.adapters.gym import probe as gym_probe
from embodied.envs.adapters.gym.family import GymConfig, GymSimConfig
from embodied.envs.base.actions import random_actions
from embodied.envs.checks.conformance import check_env
from tests.envs.test_gym import FAMILY, MODULE, make, spec, started

CAMERAS = (CameraSpec("front", 24, 32), CameraSpec.square("gray", 8), CameraSpec("render", 20, 30))


@pytest.mark.parametrize("name", ["VectorToy", "VectorEnding", "VectorMasked", "VectorBits", "Both"])
def test_vector_environments_conform(name: str) -> None:
    check_env(lambda num_envs: make(name, num_envs))


def test_a_vector_environment_with_images_conforms() -> None:
    check_env(lambda num_envs: make("VectorNested", num_envs, cameras=CAMERAS))


@pytest.mark.parametrize("name", ["Toy", "Ending", "Nested", "Masked", "MaskedChoice", "Bits"])
def test_a_vector_environment_gives_what_single_ones_give(name: str) -> None:
    cameras = CAMERAS if name == "Nested" else ()
    singles, together = started(name, 5, cameras=cameras), started(f"Vector{name}", 5, cameras=cameras)
    with singles as (single, obs), together as (vector, other):
        assert gym.probe(f"{MODULE}:Vector{name}-v0", {}, None).is_vector
        assert obs.keys() == other.keys()
        assert all(torch.equal(obs[key], other[key]) for key in obs)
        assert_alike(single, vector)


def assert_alike(one: VecEnv, other: VecEnv) -> None:
    """Both give the same for some random actions; masks allow the first choice."""
    for t in range(9):
        action = random_actions(one.spec.action, one.num_envs, 1 if one.spec.action_mask else 3, t)
        if one.spec.action_mask:
            action[:] = 0
        mine, theirs = one.step(action), other.step(action)
        for key in mine.obs:
            assert torch.equal(mine.obs[key], theirs.obs[key]), key
            assert torch.equal(mine.final_obs[key], theirs.final_obs[key]), key
        for part in ("reward_NE", "terminated_N", "truncated_N", "num_steps_N"):
            assert torch.equal(getattr(mine, part), getattr(theirs, part)), part
        assert torch.equal(mine.episodes.return_M, theirs.episodes.return_M)
        for name, once_M in mine.episodes.once.items():
            assert torch.equal(once_M, theirs.episodes.once[name]), name


def test_the_time_limit_of_a_vector_environment_is_that_of_the_plan() -> None:
    with started("VectorToy", 2, max_episode_steps=30) as (env, _):
        step = env.step(torch.zeros(2, 31, 2))
        assert step.truncated_N.all()
        assert step.episodes.length_M.tolist() == [30, 30]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", ["Ending", "Nested", "MaskedChoice"])
def test_a_vector_environment_that_resets_itself_gives_what_single_ones_give(
    name: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its mode: final observations, ends, success and masks are those of the episode that ended."""
    cameras = CAMERAS[: 3 if mode == "NextStep" else 2] if name == "Nested" else ()
    gym_probe._probe.cache_clear()
    with started(name, 5, cameras=cameras) as (one, _), started(f"{name}{mode}", 5, cameras=cameras) as (other, _):
        assert f"{name}{mode}-v0 is only a vector environment, and resets its environments itself" in caplog.text
        assert (other.film is not None) == (mode == "NextStep")
        assert_alike(one, other)
    check_env(lambda num_envs: make(f"{name}{mode}", num_envs, cameras=cameras))


def test_the_time_limit_of_a_vector_environment_that_resets_itself_is_that_of_the_plan() -> None:
    with started("NestedSameStep", 2, max_episode_steps=30) as (env, _):
        step = env.step(random_actions(env.spec.action, 2, 31, 0))
        assert step.truncated_N.all()
        assert step.episodes.length_M.tolist() == [30, 30]


def test_a_vector_environment_that_does_not_say_how_it_resets_is_refused() -> None:
    with pytest.raises(UserError, match=r"is only a vector environment, .*autoreset_mode is None, needed is one of"):
        spec("Modeless")


def test_a_vector_environment_that_resets_itself_runs_in_processes() -> None:
    with started("EndingSameStep", 4) as (one, _), started("EndingSameStep", 4, processes=2) as (other, _):
        assert_alike(one, other)


@pytest.mark.parametrize("id", ["CartPole-v1", f"{MODULE}:Unlike-v0"])
def test_single_environments_are_used_where_the_vector_environment_does_not_fit(id: str) -> None:
    """CartPole's resets itself; the other one has other observations."""
    assert not gym.probe(id, {}, None).is_vector


def test_processes_are_refused() -> None:
    with pytest.raises(UserError, match=r"sim.processes: got 2, allowed: 0, because .* steps all its"):
        make("VectorToy", processes=2)
    FAMILY.make(f"{MODULE}:VectorToy-v0", GymConfig(), num_envs=2, num_threads=1, sim=GymSimConfig()).close()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("VectorRaising", r"its vector environment raised RuntimeError in toy_gym.py, .* broken \(.* 8 control step"),
        ("VectorInfinite", r"env 0 gave a value of state that is not finite \(control step 8 of .* with seed \d+\)"),
    ],
)
def test_a_vector_environment_that_fails_is_named(name: str, what: str) -> None:
    with started(name, 2) as (env, _), pytest.raises(UserError, match=rf"task gym/{MODULE}:{name}-v0: {what}"):
        env.step(torch.zeros(2, 9, 2))


def test_pictures_of_a_vector_environment() -> None:
    with started("VectorToy", 3) as (env, _):
        frames = env.film(32, 24)()  # type: ignore[attr-defined]
        assert frames.shape == (3, 24, 32, 3)
        assert frames.max() == 255


def test_our_own_pool_comes_back_through_its_vector_environment() -> None:
    """A pool that gymnasium registers is served like any other vector environment."""
    id = "embodied.envs.views.gymnasium_api:embodied/Reach-v0"
    assert gym.probe(id, {}, None).is_vector
    check_env(lambda num_envs: FAMILY.make(id, GymConfig(), num_envs=num_envs, num_threads=1, sim=GymSimConfig()))
