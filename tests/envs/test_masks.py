"""Masks: which pixels show what an instruction names."""

from __future__ import annotations

import numpy as np
import torch

from embodied.core.types import Role
from embodied.training.scenes import LOOKS, Scenes
from envs import make_pool, make_sampler
from envs.rendering.vision import CAMERAS
from envs.tasks.words import default_words


def test_masks_show_what_the_instruction_names() -> None:
    env = make_pool("tabletop", {}, num_envs=24, num_threads=1, cameras=list(CAMERAS.values()))
    scenes, colors = Scenes(env, make_sampler(env, 3), steps=4, seed=3), default_words().colors
    seen = set()
    for _ in range(LOOKS + 1):
        obs = scenes.look()
        told = [env.spec.texts[i] for i in obs["instruction"].tolist()]
        for camera in CAMERAS:
            mask, picture = obs[f"masks.{camera}"], obs[f"images.{camera}"].float()
            seen |= {Role(role) for role in mask.unique().tolist()}
            for row, words in enumerate(told):
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
    obs = Scenes(env, make_sampler(env, 5), steps=4, seed=5).look()
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
    obs = Scenes(env, make_sampler(env, 5), steps=4, seed=5).look()
    thing, from_tool, place = obs["named"].split(3, -1)
    solids = {name: told for name, told in env.task.described().items() if not name.endswith("tray")}
    for row, i in enumerate(obs["instruction"].tolist()):
        wanted = env.spec.goals[i].partition(" -> ")[0]
        (body,) = [name for name, told in solids.items() if env.spec.descriptions[told[row]] == wanted]
        torch.testing.assert_close(thing[row], env.view.body_qpos(body)[row, :3].float())
    torch.testing.assert_close(thing - from_tool, env.task.view.tcp_pos.float())
    assert (place[:, 1].abs() > 0.2).all(), "left or right"


def test_places_are_those_of_the_instruction() -> None:
    env = make_pool("tabletop", {}, num_envs=24, num_threads=1, cameras=[CAMERAS["front"]])
    obs = Scenes(env, make_sampler(env, 0), steps=4, seed=0).look()
    for row, i in enumerate(obs["instruction"].tolist()):
        columns = (obs["masks.front"][row] == Role.PLACE).nonzero()[:, 1].float()
        assert (float(columns.mean()) < 32) == ("right tray" in env.spec.goals[i]), "it looks at the robot"
