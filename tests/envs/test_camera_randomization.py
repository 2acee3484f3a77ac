"""Pictures that vary from episode to episode: what changes, and that it follows from seed and episode alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.rendering.config import CameraRandomization
from tests.envs.helpers import actions, assert_same, pool, restart
from tests.envs.pictures import EVERYTHING, FRONT, WRIST, assert_equal, cast_every_ray, moved, rig_of

NAMES = [field.name for field in fields(CameraRandomization)]


@pytest.mark.parametrize("name", NAMES)
def test_each_randomization_changes_pictures_and_only_of_its_episodes(name: str) -> None:
    env = moved(num_envs=3)
    rig = rig_of(env, randomization=CameraRandomization(**{name: 0.2 if name != "fovy_deg" else 5.0}))
    nominal = rig_of(env).render()
    assert_equal(rig.render(), nominal)
    rig.start(np.array([0, 2]), EpisodeRng(np.array([5, 6]), np.array([0, 0])))
    spared = {"position_m": "images.wrist", "mounted_position_m": "images.front"}.get(name)
    for key, pictures in rig.render().items():
        changed = (pictures != nominal[key]).flatten(1).any(1)
        assert changed.tolist() == [key != spared, False, key != spared]


@pytest.mark.parametrize("name", ["position_m", "table_color"])
def test_randomised_pictures_are_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(moved(num_envs=4), randomization=CameraRandomization(**{name: 0.1}))
    pictures = []
    for _ in range(2):
        rig.start(np.arange(4), EpisodeRng(np.arange(4), np.zeros(4)))
        pictures.append(rig.render(**EVERYTHING))
        cast_every_ray(monkeypatch)
    assert_equal(*pictures)


def test_pictures_follow_from_seed_and_episode() -> None:
    """Whatever the number of envs; and the next episode of an env looks different."""
    options: dict[str, Any] = {
        "cameras": (FRONT, WRIST), "sim": {"camera_randomization": dict.fromkeys(NAMES, 0.1)},
        "max_episode_steps": 4,
    }  # fmt: skip
    one, many = pool("lift", 1, seed=3, **options), pool("lift", 5, seed=1, **options)
    chunk = actions([1, 2, 3, 4, 5], 2, one.spec.action_dim)
    for _ in range(3):  # the second episode begins in the middle
        assert_same(one.step(chunk[2:3]), many.step(chunk), rows_b=slice(2, 3))
    nominal = pool("lift", 1, seed=3, **{**options, "sim": {}}).observe()
    assert not torch.equal(restart(one, 3)["images.front"], nominal["images.front"])


def test_a_checkpoint_restores_what_is_seen() -> None:
    options: dict[str, Any] = {
        "cameras": (FRONT, WRIST), "sim": {"camera_randomization": {"position_m": 0.05, "object_color": 0.2}},
    }  # fmt: skip
    env, other = pool("tabletop", 3, **options), pool("tabletop", 3, seed=50, **options)
    for _ in range(2):
        restart(env)
    env.step(actions([0, 1, 2], 3, env.spec.action_dim))
    assert other.sampler is not None
    other.load_state_dict(env.state_dict(), other.sampler)
    assert_equal(other.observe(), env.observe())


def test_impossible_randomizations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"position_m: got -0.1, allowed: at least 0 and at most 1"):
        CameraRandomization(position_m=-0.1)
    with pytest.raises(ValueError, match=r"brightness: got 1.5, allowed: at least 0 and at most 0.9"):
        CameraRandomization(brightness=1.5)
    with pytest.raises(ValueError, match=r"fovy_deg: got 45, allowed for camera 'front': below 32"):
        pool(cameras=(FRONT,), sim={"camera_randomization": {"fovy_deg": 45}})
    with pytest.raises(ValueError, match=r"position_m \+ lookat_m: got 0.9, allowed for camera 'front': below 0.59"):
        pool(cameras=(FRONT,), sim={"camera_randomization": {"position_m": 0.8, "lookat_m": 0.1}})
    with pytest.raises(ValueError, match=r"mounted_position_m \+ lookat_m: got 0.8, allowed for camera 'wrist'"):
        pool(cameras=(WRIST,), sim={"camera_randomization": {"mounted_position_m": 0.8}})
    with pytest.raises(UserError, match="object_colour"):
        pool(cameras=(FRONT,), sim={"camera_randomization": {"object_colour": 0.1}})
