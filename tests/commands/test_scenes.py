"""Scenes that grounding learns from: what they show and what is told of them."""

from __future__ import annotations

import torch

from embodied.core.types import Obs, Role
from embodied.experiment import square_cameras
from embodied.scenes import LOOKS, Buffer, Pictures, Scenes
from envs import make_pool

STEPS, ENVS = 4, 16


def test_the_expert_gets_hold_of_what_is_named_before_the_next_scene() -> None:
    env = make_pool("tabletop", {}, num_envs=ENVS, cameras=square_cameras(["front", "wrist"], 16))
    scenes = Scenes(env, STEPS, seed=3)
    looks, held, asked = [], [], []
    for _ in range(LOOKS + 1):
        looks.append(scenes.look())
        asked.append(env.task.instruction_N.clone())
        held.append(int(env.view.grasped("target").sum()))
    env.close()
    assert held[0] == held[-1] == 0, "a scene begins with an empty hand"
    assert max(held) > ENVS / 4
    assert torch.equal(asked[0], asked[LOOKS - 1])
    assert not torch.equal(asked[0], asked[LOOKS])
    near = [
        (look["named"][:, 3:6].norm(dim=-1) < 0.12)[look["instruction"] == own].float().mean()
        for look, own in zip(looks[:LOOKS], asked, strict=False)
    ]
    assert torch.stack(near).mean() > 0.5
    for look in looks:
        assert look["masks.front"].shape == look["described.wrist"].shape == (ENVS, 16, 16)
        assert look["masks.front"].max() < len(Role)


def test_what_is_said_of_a_scene_is_not_always_what_the_expert_does() -> None:
    env = make_pool("tabletop", {}, num_envs=64, cameras=square_cameras(["front"], 16), splits=["train"])
    scenes, task = Scenes(env, STEPS, seed=4), env.task
    others = distant = 0
    for _ in range(LOOKS):
        look = scenes.look()
        told = look["instruction"]
        assert task.sayable()[torch.arange(64), told].all()
        assert {env.spec.instruction_splits[i] for i in told.tolist()} == {"train"}
        by_hand = (task.object - env.view.tcp_pos).norm(dim=-1) < 0.06
        elsewhere = (look["named"][:, :3] - task.object).norm(dim=-1) > 0.06
        others += int(by_hand.sum())
        distant += int((by_hand & elsewhere).sum())
    env.close()
    assert 0.2 < distant / others < 0.5, "the object at the hand is not enough to know what is named"


def test_without_masks_the_same_scenes_are_seen() -> None:
    def looks(masks: bool) -> list[Obs]:
        env = make_pool("tabletop", {}, num_envs=ENVS, cameras=square_cameras(["front", "wrist"], 16))
        scenes = Scenes(env, STEPS, seed=3, masks=masks)
        seen = [scenes.look() for _ in range(3)]
        env.close()
        return seen

    for told, untold in zip(looks(masks=True), looks(masks=False), strict=True):
        masks = {"masks.front", "masks.wrist", "described.front", "described.wrist"}
        assert set(told) == set(untold) | masks
        assert not set(untold) & masks
        assert all(torch.equal(told[key], untold[key]) for key in untold)


def test_a_buffer_keeps_the_newest() -> None:
    buffer = Buffer(5)
    for first in (0, 3):
        buffer.add({"state": torch.arange(first, first + 3.0)[:, None]})
    assert len(buffer) == 5
    assert sorted(buffer.rows("state")["state"].flatten().tolist()) == [1, 2, 3, 4, 5]
    assert set(buffer.sample(50, torch.Generator().manual_seed(0))["state"].flatten().tolist()) <= {1, 2, 3, 4, 5}
    buffer.add({"state": torch.arange(6.0, 9.0)[:, None]})
    assert sorted(buffer.rows("state")["state"].flatten().tolist()) == [4, 5, 6, 7, 8]
    drawn = buffer.sample(200, torch.Generator().manual_seed(0))["state"]
    assert sorted(drawn.unique().tolist()) == [4, 5, 6, 7, 8]


def test_pictures_are_made_as_they_are_needed() -> None:
    env = make_pool("tabletop", {}, num_envs=ENVS, cameras=square_cameras(["front"], 16))
    pictures = Pictures(
        env, STEPS, seed=0, updates=0, capacity=1000, reuse=2.0, keep=lambda obs: {"state": obs["state"]}
    )
    assert pictures.buffer.added == LOOKS * ENVS
    generator = torch.Generator().manual_seed(0)
    drawn = 0
    while drawn < 4 * LOOKS * ENVS:
        assert set(pictures.draw(10, generator)) == {"state"}
        drawn += 10
    env.close()
    assert drawn / 2 <= pictures.buffer.added < drawn / 2 + ENVS
