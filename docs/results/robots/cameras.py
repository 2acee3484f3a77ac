"""Measure policies' cameras with several arms beside the Panda's: ``python docs/results/robots/cameras.py <robot>...``

Robots take turns in one process; the least processor time of all turns counts. The last line is the result as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from embodied.core.spec import CameraSpec
from embodied.envs import make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool

CAMERAS = [CameraSpec.square(name, 64) for name in ("front", "wrist")]
NUM_ENVS, STEPS, TURNS = 128, 12, 25


def seeing(robot: str) -> MujocoPool:
    """Return a pool whose arms are on their way to the object."""
    pool = make_pool("lift", {"robot": robot}, num_envs=NUM_ENVS, num_threads=1, cameras=CAMERAS)
    pool.reset(make_sampler(pool, seed=0))
    for _ in range(STEPS):
        pool.step(pool.task.expert())
    return pool


def main(robots: list[str]) -> None:
    torch.set_num_threads(1)
    pools = {robot: seeing(robot) for robot in ("panda", *robots)}
    least_s = dict.fromkeys(pools, float("inf"))
    for _ in range(TURNS):
        for robot, pool in pools.items():
            start_s = time.process_time()
            pool.rig.render()
            least_s[robot] = min(least_s[robot], time.process_time() - start_s)
    rows = {
        robot: {
            "geoms": int(pool.task.robot.coarse.ngeom),
            "images_per_s": round(len(CAMERAS) * NUM_ENVS / least_s[robot]),
            "of_the_pandas": round(least_s["panda"] / least_s[robot], 3),
        }
        for robot, pool in pools.items()
    }
    print(json.dumps({"task": "lift", "cameras": ["front", "wrist"], "pixels": 64, "threads": 1, "robots": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
