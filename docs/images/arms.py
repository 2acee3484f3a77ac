"""Draw docs/images/arms.png: ``python docs/images/arms.py``, with the packages of docs/extending/robot.md installed.

YAM, xArm7 and UR5e with a 2F-85 carry a cube to the tray, moved by the scripted expert of ``pick_place``.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from embodied.envs import make_pool, make_sampler

STEPS = {"yam": 22, "xarm7": 32, "ur5e_2f85": 26}  # when the cube is on its way
tiles = []
for robot, steps in STEPS.items():
    pool = make_pool("pick_place", {"robot": robot}, num_envs=1)
    pool.reset(make_sampler(pool, seed=0))
    for _ in range(steps):
        pool.step(pool.task.expert())
    tiles.append(pool.film(400, 300)()[0])
image = Image.fromarray(np.concatenate([tile[:, 60:360] for tile in tiles], 1))
image.quantize(200, method=Image.Quantize.MAXCOVERAGE).save(Path(__file__).with_suffix(".png"), optimize=True)
