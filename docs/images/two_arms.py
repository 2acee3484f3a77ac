"""Draw docs/images/two_arms.png: ``python docs/images/two_arms.py``.

Two Pandas and two SO-101s hold the bar, moved by the scripted expert of ``lift_bar``.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from embodied.envs import make_pool, make_sampler

tiles = []
for robot in ("panda", "so101"):
    pool = make_pool("lift_bar", {"robots": {"left": robot, "right": robot}}, num_envs=1)
    pool.reset(make_sampler(pool, seed=1))
    for _ in range(40):
        pool.step(pool.task.expert())
    tiles.append(pool.film(480, 360)()[0])
image = Image.fromarray(np.concatenate(tiles, 1))
image.quantize(200, method=Image.Quantize.MAXCOVERAGE).save(Path(__file__).with_suffix(".png"), optimize=True)
