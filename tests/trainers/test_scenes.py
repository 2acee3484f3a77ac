"""Scenes that grounding learns from: what they show and how they are labelled."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.spec import CameraSpec, EnvSpec
from embodied.core.types import Obs, Role
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.labels import LabeledPool
from embodied.trainers.scenes import FRAMES_PER_SCENE, SceneDataset, render_scenes

STEPS, ENVS = 4, 16


def test_the_expert_gets_hold_of_what_is_named_before_the_next_scene() -> None:
    env = make_pool("tabletop", {}, num_envs=ENVS, cameras=[CameraSpec.square(name, 16) for name in ("front", "wrist")])
    scenes = render_scenes(LabeledPool(env, make_sampler(env, 3)), seed=3)
    frames, held = [], []
    for _ in range(FRAMES_PER_SCENE + 1):
        frames.append(next(scenes))
        held.append(int(env.view.grasped("target").sum()))
    env.close()
    assert held[0] == held[-1] == 0, "a scene begins with an empty hand"
    assert max(held) > ENVS / 4
    assert torch.equal(frames[0]["instruction"], frames[FRAMES_PER_SCENE - 1]["instruction"])
    assert not torch.equal(frames[0]["instruction"], frames[FRAMES_PER_SCENE]["instruction"])
    near = [(obs["target_positions"][:, 3:6].norm(dim=-1) < 0.12).float().mean() for obs in frames[:FRAMES_PER_SCENE]]
    assert torch.stack(near).mean() > 0.5
    for obs in frames:
        assert obs["masks.front"].shape == obs["described.wrist"].shape == (ENVS, 16, 16)
        assert obs["masks.front"].max() < len(Role)


def test_without_masks_the_same_scenes_are_seen() -> None:
    def render(masks: bool) -> list[Obs]:
        env = make_pool(
            "tabletop", {}, num_envs=ENVS, cameras=[CameraSpec.square(name, 16) for name in ("front", "wrist")]
        )
        scenes = render_scenes(LabeledPool(env, make_sampler(env, 3), masks=masks), seed=3)
        frames = [next(scenes) for _ in range(3)]
        env.close()
        return frames

    for labelled, plain in zip(render(masks=True), render(masks=False), strict=True):
        masks = {"masks.front", "masks.wrist", "described.front", "described.wrist"}
        assert set(labelled) == set(plain) | masks
        assert not set(plain) & masks
        assert all(torch.equal(labelled[key], plain[key]) for key in plain)


class CountingEnv:
    """Two envs whose observation is how often they have acted: a LabeledPool without a simulator."""

    spec = EnvSpec.of_sizes("count", state=1, action=1, max_episode_steps=2 * FRAMES_PER_SCENE * STEPS)
    num_envs = 2

    def __init__(self) -> None:
        self.scenes = self.acted = 0

    def next_scene(self) -> Obs:
        self.scenes += 1
        return self.observe()

    def act(self, action_NA: Tensor) -> None:
        self.acted += 1

    def act_and_render(self, action_NA: Tensor) -> Obs:
        self.act(action_NA)
        return self.observe()

    def expert(self) -> Tensor:
        return torch.zeros(2, 1, dtype=torch.float64)

    def observe(self) -> Obs:
        return {"state": torch.full((2, 1), float(self.acted)), "left_out": torch.zeros(2)}


def state_alone(obs: Obs) -> Obs:
    return {"state": obs["state"]}


def test_frames_are_rendered_as_they_are_needed() -> None:
    env = CountingEnv()
    data = SceneDataset(map(state_alone, render_scenes(env, seed=0)), capacity=1000, reuse=2.0)
    assert (data.added, env.scenes) == (FRAMES_PER_SCENE * 2, 1)
    assert data.rows("state")["state"].flatten().tolist()[::2] == list(range(0, FRAMES_PER_SCENE * STEPS, STEPS))
    generator = torch.Generator().manual_seed(0)
    drawn = 0
    while drawn < 8 * FRAMES_PER_SCENE:
        assert set(data.draw(10, generator)) == {"state"}
        drawn += 10
    assert drawn / 2 <= data.added < drawn / 2 + env.num_envs
    assert env.scenes == -(-data.added // (2 * FRAMES_PER_SCENE))


def test_the_newest_observations_are_kept() -> None:
    scenes = map(state_alone, render_scenes(CountingEnv(), seed=0))
    data = SceneDataset(scenes, capacity=5, reuse=1000.0)
    for first in (0, 3):
        data.add({"state": torch.arange(first, first + 3.0)[:, None]})
    assert len(data) == 5
    assert sorted(data.rows("state")["state"].flatten().tolist()) == [1, 2, 3, 4, 5]
    assert set(data.draw(50, torch.Generator().manual_seed(0))["state"].flatten().tolist()) <= {1, 2, 3, 4, 5}
    data.add({"state": torch.arange(6.0, 9.0)[:, None]})
    assert sorted(data.rows("state")["state"].flatten().tolist()) == [4, 5, 6, 7, 8]
    drawn = data.draw(200, torch.Generator().manual_seed(0))["state"]
    assert sorted(drawn.unique().tolist()) == [4, 5, 6, 7, 8]
