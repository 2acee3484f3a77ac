"""MuJoCo Warp beside MuJoCo's batch engine: ``python docs/results/warp_agreement.py``

How far their states are apart one control step after equal ones, for random and for expert actions, and how fast both
pools are. Last line of stdout, kept as bench/warp.json: {"what", "machine", "agreement", "speed"}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from embodied.benchmarks.measure import in_turns, machine, paired, timed
from embodied.core.spec import Term, slices_of
from embodied.envs import FAMILIES, make_pool, make_sampler
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.warp.pool import WarpConfig, WarpPool
from embodied.runtime import threads

TASKS = ("reach", "detour", "push", "lift", "pick_place", "stack")
NUM_ENVS, STEPS = 32, 60
SPEED_ENVS, SPEED_STEPS, ROUNDS = 64, 8, 5
CARRIED = ("qpos", "qvel", "ctrl", "mocap_pos", "qacc_warmstart")


def both(task: str, num_envs: int) -> tuple[WarpPool, MujocoPool]:
    """Return both pools at the start of the same episodes, some of them with the object in the hand."""
    mujoco = make_pool(task, {}, num_envs=num_envs, num_threads=threads.available_cores())
    family = FAMILIES["mujoco"].build()
    config = family.task_config(task)()
    warp = family.make(task, config, num_envs=num_envs, num_threads=0, sim=WarpConfig(device="cpu"))
    assert isinstance(warp, WarpPool)
    for pool in (mujoco, warp):
        pool.reset(make_sampler(mujoco, 0, stages=True))
    return warp, mujoco


def agreement(task: str) -> dict[str, Any]:
    """Return the differences after one control step, in the units of the terms: median, 99% and greatest over envs."""
    warp, mujoco = both(task, NUM_ENVS)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {}
    flipped = 0
    for _ in range(STEPS):
        for name in CARRIED:
            warp.batch.bind(name).copy_(torch.from_numpy(mujoco.batch.bind(name)))
        warp.batch.forward()
        action = 2 * torch.rand(NUM_ENVS, mujoco.spec.action_dim, generator=generator) - 1
        action[::2] = mujoco.expert()[::2]
        mine, theirs = warp.step(action), mujoco.step(action)
        going_on = torch.ones(NUM_ENVS, dtype=torch.bool)
        going_on[mine.final_ids] = going_on[theirs.final_ids] = False
        for key, terms in (("state", mujoco.spec.state), ("privileged", mujoco.spec.privileged)):
            difference = (mine.obs[key] - theirs.obs[key]).abs()[going_on]
            for name, part in by_term(difference, terms).items():
                found.setdefault(name, []).append(part.flatten())
        found.setdefault("reward", []).append((mine.reward_NE - theirs.reward_NE).abs()[going_on].flatten())
        flipped += int((mine.info["success"] != theirs.info["success"])[going_on].sum())
    shares = torch.tensor([0.5, 0.99, 1.0])
    rows = {name: [float(f"{x:.2g}") for x in torch.cat(parts).quantile(shares)] for name, parts in found.items()}
    return {"steps": NUM_ENVS * STEPS, "success_differs": flipped, "median_p99_max": rows}


def by_term(values: Tensor, terms: tuple[Term, ...]) -> dict[str, Tensor]:
    """Return the columns of each term, in its units."""
    return {term.name: values[..., slices_of(terms)[term.name]] / term.scale for term in terms}


def speed(task: str) -> dict[str, float]:
    """Return control steps per second of both pools, and their ratio."""
    pools = dict(zip(("warp", "mujoco"), both(task, SPEED_ENVS), strict=True))
    action = 2 * torch.rand(SPEED_ENVS, SPEED_STEPS, pools["warp"].spec.action_dim) - 1
    count = SPEED_ENVS * SPEED_STEPS
    results = in_turns({k: lambda p=p: count / timed(lambda: p.step(action)) for k, p in pools.items()}, ROUNDS)
    medians = {name: float(torch.tensor(speeds).median()) for name, speeds in results.items()}
    return {**medians, "ratio": paired(results["warp"], results["mujoco"]), "num_envs": SPEED_ENVS}


if __name__ == "__main__":
    threads.use(1)
    rows = {task: agreement(task) for task in sys.argv[1:] or TASKS}
    speeds = {task: speed(task) for task in rows}
    print(json.dumps({"what": "warp", "machine": machine(), "agreement": rows, "speed": speeds}))
