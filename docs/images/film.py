"""Make film.gif: ``python docs/images/film.py``. Scripted experts solve an episode each, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.viewer import FRONT, Viewer

SCENES, SEED = (("push", "panda"), ("pick_place", "panda"), ("pick_place", "so101"), ("stack", "so101")), 3
SIZE, EVERY, COLORS = (240, 200), 2, 64  # width and height in pixels; control steps per frame; colours of the palette
REST_STEPS = 16  # control steps after success


def episode(task: str, robot: str) -> list[np.ndarray]:
    """Return images [h, w, 3] of an episode from its start until ``REST_STEPS`` steps after it is solved."""
    env = make_pool(task, {"robot": robot}, num_envs=1, num_threads=1)
    camera = replace(FRONT, fovy_deg=29.0, lookat=(0.33, 0.0, 0.24)).scaled(env.task.scale.reach)
    render = Viewer(env.task, env.batch, replace(camera, width=SIZE[0], height=SIZE[1])).render
    env.reset(make_sampler(env, SEED))
    frames, rest = [render()[0].copy()], REST_STEPS
    for step_number in range(1, env.spec.max_episode_steps):
        step = env.step(env.task.expert())
        rest -= bool(step.info["success"])
        if step_number % EVERY == 0:
            frames.append(render()[0].copy())
        if not rest:
            break
    return frames


def main() -> None:
    torch.set_num_threads(1)
    episodes = [episode(task, robot) for task, robot in SCENES]
    length = max(map(len, episodes))
    films = [[*frames, *[frames[-1]] * (length - len(frames))] for frames in episodes]
    images = [Image.fromarray(np.concatenate(row, axis=1)) for row in zip(*films, strict=True)]
    samples = Image.fromarray(np.concatenate([np.asarray(image) for image in images[:: length // 4]]))
    palette = samples.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    path = Path(__file__).with_suffix(".gif")
    first.save(path, save_all=True, append_images=others, duration=EVERY * 50, loop=0, optimize=True)


if __name__ == "__main__":
    main()
