"""Control steps per CPU second of the pool with several robots, in turns: ``python docs/results/robots/speed.py``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import torch

from embodied.envs import make_pool, make_sampler

ROUNDS, STEPS, ENVS = 8, 24, 256

torch.set_num_threads(1)
result: dict[str, dict[str, float]] = {}
for task in ("lift", "pick_place"):
    pools = {robot: make_pool(task, {"robot": robot}, num_envs=ENVS, num_threads=1) for robot in ("panda", "so101")}
    for pool in pools.values():
        pool.reset(make_sampler(pool, seed=0))
    speeds: dict[str, list[float]] = {robot: [] for robot in pools}
    for _ in range(ROUNDS):
        for robot, pool in pools.items():
            actions = torch.rand(STEPS, ENVS, pool.spec.action_dim) * 2 - 1
            began_s = time.process_time()
            for action in actions:
                pool.step(action)
            speeds[robot].append(STEPS * ENVS / (time.process_time() - began_s))
    ratio = median(one / other for one, other in zip(speeds["so101"], speeds["panda"], strict=True))
    result[task] = {robot: round(median(found)) for robot, found in speeds.items()}
    result[task]["so101_over_panda"] = round(ratio, 3)
print(result)
Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
