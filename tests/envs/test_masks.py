"""Masks: which pixels show what an instruction names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from embodied.core.types import Obs, Role
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.labels import LabeledPool
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.rendering.vision import CAMERAS
from embodied.envs.tasks.config import default_words
from embodied.trainers.scenes import FRAMES_PER_SCENE, render_scenes


def scenes_of(env: MujocoPool, seed: int) -> Iterator[Obs]:
    return render_scenes(LabeledPool(env, make_sampler(env, seed)), seed=seed)


def test_masks_show_what_the_instruction_names() -> None:
    env = make_pool("tabletop", {}, num_envs=24, num_threads=1, cameras=list(CAMERAS.values()))
    scenes, colors = scenes_of(env, 3), default_words().colors
    seen = set()
    for _ in range(FRAMES_PER_SCENE + 1):
        obs = next(scenes)
        texts = [env.spec.texts[i] for i in obs["instruction"].tolist()]
        for camera in CAMERAS:
            mask, picture = obs[f"masks.{camera}"], obs[f"images.{camera}"].float()
            seen |= {Role(role) for role in mask.unique().tolist()}
            for row, words in enumerate(texts):
                named = picture[row][mask[row] == Role.OBJECT]
                if len(named) < 5:
                    continue
                hue = named.mean(0) / named.mean(0).norm()
                away = {
                    name: float((hue - torch.tensor(rgb) / np.linalg.norm(rgb)).norm()) for name, rgb in colors.items()
                }
                assert min(away, key=away.__getitem__) in words
    assert seen == set(Role)


def test_words_describe_what_pixels_show() -> None:
    env = make_pool("tabletop", {}, num_envs=24, num_threads=1, cameras=[CAMERAS["front"]])
    obs = next(scenes_of(env, 5))
    texts = ("nothing", *env.spec.descriptions)
    for row, i in enumerate(obs["instruction"].tolist()):
        by_role = {role: obs["described.front"][row][obs["masks.front"][row] == role].unique() for role in Role}
        named, place = ([texts[index] for index in by_role[role].tolist()] for role in (Role.OBJECT, Role.PLACE))
        solid, _, tray = env.spec.goals[i].partition(" -> ")
        assert set(named) <= {solid}
        assert place == [tray]
        assert by_role[Role.NONE].tolist() == [0]


def test_what_is_named_is_seen_from_base_and_tool() -> None:
    env = make_pool("tabletop", {}, num_envs=6, num_threads=1, cameras=[CAMERAS["front"]])
    obs = next(scenes_of(env, 5))
    thing, from_tool, place = obs["target_positions"].split(3, -1)
    solids = {body: index_N for body, index_N in env.task.body_descriptions().items() if not body.endswith("tray")}
    for row, i in enumerate(obs["instruction"].tolist()):
        wanted = env.spec.goals[i].partition(" -> ")[0]
        (body,) = [body for body, index_N in solids.items() if env.spec.descriptions[index_N[row]] == wanted]
        torch.testing.assert_close(thing[row], env.view.body_qpos(body)[row, :3].float())
    torch.testing.assert_close(thing - from_tool, env.task.view.tcp_pos.float())
    assert (place[:, 1].abs() > 0.2).all(), "left or right"


def test_places_are_those_of_the_instruction() -> None:
    env = make_pool("tabletop", {}, num_envs=24, num_threads=1, cameras=[CAMERAS["front"]])
    obs = next(scenes_of(env, 0))
    for row, i in enumerate(obs["instruction"].tolist()):
        columns = (obs["masks.front"][row] == Role.PLACE).nonzero()[:, 1].float()
        assert (float(columns.mean()) < 32) == ("right tray" in env.spec.goals[i]), "it looks at the robot"


def test_only_tasks_with_descriptions_describe_what_cameras_see() -> None:
    for task, labels in (("tabletop", True), ("pick_place", False)):
        env = make_pool(task, {}, num_envs=1, num_threads=1, cameras=[CAMERAS["front"]])
        assert bool(env.task.descriptions) == bool(env.spec.descriptions) == labels
