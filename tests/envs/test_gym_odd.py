"""Environments of gymnasium that are odd, but within its interface: limits, names, sizes, constructors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from embodied import eval as evaluate
from embodied import train
from embodied.core.episodes import PlanList
from embodied.core.errors import UserError
from embodied.envs import FAMILIES
from embodied.envs.adapters.config import GymConfig, GymSimConfig
from embodied.envs.adapters.gym.probe import _probe
from embodied.envs.episodes.sampler import first_episodes
from embodied.session.defaults import compose_new
from embodied.session.factories import acting_envs, make_acting_env, make_eval_env
from tests.commands.helpers import run
from tests.envs.toy_gym import Toy

FAMILY = FAMILIES["gym"].build()
VECTOR, IMAGE = spaces.Box(-1, 1, (2,)), spaces.Box(0, 255, (16, 16, 3), np.uint8)


class Odd(Toy):
    """Has the spaces that it is told, and observes random members of them."""

    observation_space: Any = spaces.Dict({"goal": IMAGE, "arm": VECTOR})

    def observation(self) -> Any:
        return self.observation_space.sample()


class Late(Odd):
    """Observes the time as a number too large for float32."""

    observation_space = spaces.Dict({"clock": spaces.Box(0, np.inf, (1,), np.float64), "arm": VECTOR})

    def observation(self) -> Any:
        return {"clock": np.array([1.7e9 + 0.05 * self.steps]), "arm": np.full(2, self.steps, np.float32)}


class Plain(Odd):
    """Names a render mode that its constructor does not take."""

    def __init__(self) -> None:
        super().__init__()


class Clinging(Plain):
    def close(self) -> None:
        raise RuntimeError("the viewer is gone")


def spec_of(kind: type[Odd], **attributes: Any) -> Any:
    name = f"{kind.__name__}{len(gymnasium.registry)}-v0"
    gymnasium.register(name, type(kind.__name__, (kind,), attributes), max_episode_steps=12)
    return FAMILY.spec(name, GymConfig()), name


def test_images_beside_a_state_are_observed_unless_cameras_are_chosen() -> None:
    spec, name = spec_of(Odd)
    assert spec.images == ("goal",)
    assert compose_new({"task": f"gym/{name}"}).policy.options.cameras == ("goal",)
    assert compose_new({"task": f"gym/{name}", "policy.cameras": []}).policy.options.cameras == ()


SERVED_NOT = {
    "a camera that is called as the picture for people": (
        {"render": IMAGE, "arm": VECTOR},
        None,
        r"\['render'\].*rename",
    ),
    "two cameras of one name": ({"a_b": IMAGE, "a": spaces.Dict({"b": IMAGE})}, None, "both named 'a_b'"),
    "two terms of one name": ({"a.b": VECTOR, "a": spaces.Dict({"b": VECTOR})}, None, "both named 'a.b'"),
    "a choice of very many": ({"cell": spaces.Discrete(2**40)}, None, "1,099,511,627,776 choices"),
    "limits that are none": ({"arm": VECTOR}, spaces.Box(-3.4e38, 3.4e38, (2,)), "no limits"),
    "no entry": ({"arm": VECTOR}, spaces.Box(-1, 1, (0,)), r"shape \[0\]"),
}


@pytest.mark.parametrize("case", SERVED_NOT)
def test_what_cannot_be_served_is_named(case: str) -> None:
    observed, action, said = SERVED_NOT[case]
    attributes = {"observation_space": spaces.Dict(observed)} | ({} if action is None else {"action_space": action})
    with pytest.raises(UserError, match=said):
        spec_of(Odd, **attributes)


def test_numbers_that_float32_blurs_are_said(caplog: pytest.LogCaptureFixture) -> None:
    spec_of(Late)
    assert "'clock'" in caplog.text
    assert "'arm'" not in caplog.text


@pytest.mark.parametrize("kind", [Plain, Clinging])
def test_pictures_and_closing_are_not_needed(kind: type[Odd], caplog: pytest.LogCaptureFixture) -> None:
    _, name = spec_of(kind)
    env = FAMILY.make(name, GymConfig(), num_envs=2, num_threads=1, sim=GymSimConfig())
    assert env.film is None
    env.close()
    assert ("the viewer is gone" in caplog.text) == (kind is Clinging)


def test_a_file_in_the_place_of_a_module_is_named() -> None:
    with pytest.raises(UserError, match=r"gym/zoo:Reach-v0"):
        FAMILY.spec("zoo.py:Reach-v0", GymConfig())


def test_a_run_is_refused_by_an_environment_with_other_limits(tmp_path: Path) -> None:
    """Its actions would be scaled to the new limits without a word."""
    name = spec_of(Odd)[1]
    words = [f"task=gym/{name}", "num_envs=2", "runtime.decisions=8", "eval_episodes=1", f"out={tmp_path / 'run'}"]
    outcome = run(train.main, [*words, "total_steps=32", "runtime.eval_every=1000", "policy.cameras=[]"])
    assert outcome.code == 0
    assert "not observed: goal" in outcome.stderr
    kind: Any = gymnasium.registry[name].entry_point
    kind.action_space = spaces.Box(np.array([0.0, -3.0]), np.array([2.0, 5.0]), dtype=np.float64)
    _probe.cache_clear()
    for main, options in (
        (train.main, [f"resume={tmp_path / 'run'}", "total_steps=64"]),
        (evaluate.main, [f"run={tmp_path / 'run'}"]),
    ):
        outcome = run(main, options)
        assert outcome.code == 2
        assert "action 'action[0]' was 0 to 1, is 0 to 2" in outcome.stderr


class MaskedLater(Odd):
    """Says which choices are allowed, but not yet at a reset."""

    observation_space = VECTOR
    action_space = spaces.Discrete(3)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        assert self.steps == 1 or action == 2, "only this one is allowed"
        return observation, reward, terminated, truncated, {**info, "action_mask": np.array([0, 0, 1])}


def test_a_mask_that_is_not_in_the_first_info_counts() -> None:
    spec, name = spec_of(MaskedLater)
    assert spec.action_mask
    with closing(FAMILY.make(name, GymConfig(), num_envs=2, num_threads=1, sim=GymSimConfig())) as env:
        obs = env.reset(PlanList(first_episodes(env.spec, 2, 0), 2))
        assert obs["action_mask"].all()
        assert env.step(torch.zeros(2, 1, dtype=torch.int64)).obs["action_mask"].tolist() == [[False, False, True]] * 2


def test_a_mask_has_no_meaning_for_continuous_actions() -> None:
    class Masked(Odd):
        observation_space = VECTOR

        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return *rest, {**info, "action_mask": np.ones(5)}

    spec, name = spec_of(Masked)
    assert not spec.action_mask
    with closing(FAMILY.make(name, GymConfig(), num_envs=2, num_threads=1, sim=GymSimConfig())) as env:
        env.reset(PlanList(first_episodes(env.spec, 2, 0), 2))
        env.step(torch.zeros(2, env.spec.action_dim))


class Vector(Plain):
    observation_space = VECTOR


@pytest.mark.parametrize("wrapper", [gymnasium.wrappers.NormalizeObservation, gymnasium.wrappers.NormalizeReward])
def test_wrappers_with_statistics_of_each_copy_are_refused(wrapper: Any) -> None:
    name = f"Normalised{len(gymnasium.registry)}-v0"
    gymnasium.register(name, lambda: gymnasium.wrappers.ClipReward(wrapper(Vector()), -1, 1), max_episode_steps=12)
    with pytest.raises(UserError, match=f"wrapper {wrapper.__name__} keeps statistics of its own in each copy"):
        FAMILY.spec(name, GymConfig())


def test_a_time_limit_inside_of_what_is_registered_is_found() -> None:
    name = f"Inside{len(gymnasium.registry)}-v0"
    gymnasium.register(name, lambda: gymnasium.wrappers.TimeLimit(Plain(), 7))
    spec = FAMILY.spec(name, GymConfig())
    assert (spec.max_episode_steps, "max_episode_steps" in spec.assumed) == (7, False)
    assert FAMILY.spec(name, GymConfig(max_episode_steps=5)).max_episode_steps == 5


def test_evaluations_have_no_more_copies_than_training() -> None:
    """They may be large, or share what exists once per process; those of our pool are rows of arrays."""
    _, name = spec_of(Odd)
    ours, other = compose_new({"task": "lift", "num_envs": 8}), compose_new({"task": f"gym/{name}", "num_envs": 8})
    assert (acting_envs(ours, 200), acting_envs(other, 200), acting_envs(other, 3)) == (200, 8, 3)
    for make, found in ((make_acting_env, 600), (make_eval_env, 512)):  # training has as many as it was told
        with closing(make(compose_new({"task": "reach", "num_envs": 600}), 600)) as env:
            assert env.num_envs == found
