"""Scenes that grounding learns from: what they show and what is told of them."""

from __future__ import annotations

import torch

from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, Role
from embodied.run.factories import square_cameras
from embodied.training.scenes import LOOKS, Buffer, Pictures, Scenes
from envs import SamplerSetup, UniformConfig, UniformSampler, make_pool, make_sampler

STEPS, ENVS = 4, 16


def test_the_expert_gets_hold_of_what_is_named_before_the_next_scene() -> None:
    env = make_pool("tabletop", {}, num_envs=ENVS, cameras=square_cameras(["front", "wrist"], 16))
    scenes = Scenes(env, make_sampler(env, 3), STEPS, seed=3)
    looks, held = [], []
    for _ in range(LOOKS + 1):
        looks.append(scenes.look())
        held.append(int(env.view.grasped("target").sum()))
    env.close()
    assert held[0] == held[-1] == 0, "a scene begins with an empty hand"
    assert max(held) > ENVS / 4
    assert torch.equal(looks[0]["instruction"], looks[LOOKS - 1]["instruction"])
    assert not torch.equal(looks[0]["instruction"], looks[LOOKS]["instruction"])
    near = [(look["named"][:, 3:6].norm(dim=-1) < 0.12).float().mean() for look in looks[:LOOKS]]
    assert torch.stack(near).mean() > 0.5
    for look in looks:
        assert look["masks.front"].shape == look["described.wrist"].shape == (ENVS, 16, 16)
        assert look["masks.front"].max() < len(Role)


def test_without_masks_the_same_scenes_are_seen() -> None:
    def looks(masks: bool) -> list[Obs]:
        env = make_pool("tabletop", {}, num_envs=ENVS, cameras=square_cameras(["front", "wrist"], 16))
        scenes = Scenes(env, make_sampler(env, 3), STEPS, seed=3, masks=masks)
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


def sampler_of(spec: EnvSpec, num_envs: int, first_seed: int) -> UniformSampler:
    return UniformSampler(spec, UniformConfig(), SamplerSetup(num_envs, first_seed))


def test_pictures_are_made_as_they_are_needed() -> None:
    env = make_pool("tabletop", {}, num_envs=ENVS, cameras=square_cameras(["front"], 16))
    pictures = Pictures(
        env, sampler_of, STEPS, seed=0, updates=0, capacity=1000, reuse=2.0, keep=lambda obs: {"state": obs["state"]}
    )
    assert pictures.buffer.added == LOOKS * ENVS
    generator = torch.Generator().manual_seed(0)
    drawn = 0
    while drawn < 4 * LOOKS * ENVS:
        assert set(pictures.draw(10, generator)) == {"state"}
        drawn += 10
    env.close()
    assert drawn / 2 <= pictures.buffer.added < drawn / 2 + ENVS
