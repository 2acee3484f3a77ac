"""Makes rollout.png: ``python docs/images/rollout.py [run=<run dir>]``. An episode of ``tabletop`` for each of three
instructions, as policies see it: six moments from the start until it is solved, by the front and the wrist camera.

The deterministic policy of a run acts, or without one the task's scripted expert.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from embodied.core.config import parse_overrides
from embodied.core.types import Obs
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.rendering.vision import CAMERAS
from embodied.report.video import caption
from embodied.session.config import read_run
from embodied.session.factories import load_checkpoint, load_policy, make_env

SEEDS = (17, 19, 22)  # of the episodes; an even one asks for a goal that is held out from training
MOMENTS, SCALE, GAP = 6, 3, 2  # pixels

Act = Callable[[Obs], Tensor]
"""obs of one env ─► actions [1, E, A] or [1, A]"""


def expert() -> tuple[MujocoPool, Act]:
    env = make_pool("tabletop", {}, num_envs=1, cameras=list(CAMERAS.values()))
    return env, lambda obs: env.task.expert()


def learned(run_dir: Path) -> tuple[MujocoPool, Act]:
    """A run's task, with the cameras of its policy, and how the policy acts."""
    config = read_run(run_dir)
    policy = load_policy(config, load_checkpoint(run_dir, "last"))
    env = make_env(config, 1, 1)
    assert isinstance(env, MujocoPool)
    return env, lambda obs: policy.plan(obs)[:, : policy.execute]


def episode(env: MujocoPool, act: Act, seed: int) -> np.ndarray:
    """What the cameras see at MOMENTS times until the task is solved or time is up, [cameras, MOMENTS, h, w, 3]."""
    assert env.rig is not None, "the policy has no cameras"
    rig, seen = env.rig, []

    def look(_: MujocoPool) -> None:
        pictures = rig.render()
        seen.append(torch.stack([pictures[f"images.{camera.name}"][0] for camera in env.spec.cameras]).numpy())

    obs, solved, ended = env.reset(make_sampler(env, seed)), False, False
    env.on_control_step = look
    look(env)
    while not solved and not ended:
        step = env.step(act(obs))
        obs, solved, ended = step.obs, bool(step.info["success"]), bool(step.terminated_N | step.truncated_N)
    env.on_control_step = None
    return np.stack([seen[t] for t in np.linspace(0, len(seen) - 1, MOMENTS).round().astype(int)], axis=1)


def main() -> None:
    torch.set_num_threads(1)
    run = parse_overrides(sys.argv[1:]).get("run")
    env, act = expert() if run is None else learned(Path(run))
    texts, strips = [], []
    for seed in SEEDS:
        env.reset(make_sampler(env, seed))
        texts += env.instruction_texts
        large = episode(env, act, seed).repeat(SCALE, 2).repeat(SCALE, 3)
        tiles = np.pad(large, ((0, 0), (0, 0), (GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255)
        strips.append(np.concatenate([np.concatenate(list(row), axis=1) for row in tiles]))
    picture = np.concatenate(list(caption(np.stack(strips), texts)))
    Image.fromarray(picture).save(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
