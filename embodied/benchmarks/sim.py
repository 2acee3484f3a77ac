"""Speed and memory of the environment pool. All speeds are control steps per second, over all envs.

    pool_over_engine_1024        pool / bare engine with gravity and timers, same envs, states and controls (``Replay``)
    pool_flatness_256_8192       pool with n envs / pool with 1,024 envs, the smallest over n
    pool_over_<peer>             pool / bare steps of mjbatch, mjbatch_uni with the MuJoCo of their own, as above;
                                 also engine_over_<peer>, and engine_reduced_over_<peer> without gravity and timers
    pool_over_envpool            pool / EnvPool's PandaPickCube-v1, if installed; its control step is shorter
    warp_pool_over_engine        pool of sim=warp / the recorded kernels of MuJoCo Warp alone, as above, 64 envs
    <family>_adapter_over_bare   see embodied/benchmarks/adapters.py
    rss_gb_4096                  peak resident memory of a process that steps 4,096 envs, GB

Actions are uniform in [-1, 1], in chunks of 4 as the default policies execute them. Only control steps that were
executed count.
"""

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from embodied.benchmarks import adapters
from embodied.benchmarks.config import Part, SimOptions
from embodied.benchmarks.measure import Report, built, in_turns, paired, timed
from embodied.benchmarks.peers.own import PeerBatch
from embodied.envs import TASKS, make_pool, make_sampler
from embodied.envs.mujoco.config import WarpConfig
from embodied.envs.mujoco.engine import timers
from embodied.envs.mujoco.pool import MujocoPool
from embodied.envs.mujoco.warp.batch import WarpBatch
from embodied.envs.mujoco.warp.pool import WarpPool
from embodied.runtime import threads

TASK = "pick_place"
ENVPOOL_ID, ENVPOOL_PEER = "PandaPickCube-v1", "lift"
PEERS = ("mjbatch", "mjbatch_uni")
CHUNK = 4
SPEED = "control steps/s"


def measure(report: Report, short: bool, options: SimOptions) -> None:
    """Measure the ratios and rows of the parts; ``short`` only shows that it works."""
    threads.use(1)  # as an env worker does
    rounds, env_steps = (2, 64) if short else (9, 16_384)
    reference = _pool(TASK, 16 if short else 1024)
    _speed(reference, 40)
    measures: dict[Part, Callable[[], None]] = {
        "engine": partial(engine, report, reference, rounds, env_steps),
        "flatness": partial(
            flatness, report, reference, (8, 32) if short else (256, 512, 2048, 4096, 8192), rounds, env_steps
        ),
        "envpool": partial(against_envpool, report, 4 if short else 64, rounds, env_steps),
        "warp": partial(against_warp, report, "warp_pool_over_engine", *((2, 2, 2) if short else (64, 9, 16))),
        "adapters": partial(adapters.measure, report, short),
        "memory": partial(memory, report, 32 if short else 4096),
    }
    for part in options.parts:
        measures[part]()


def engine(report: Report, pool: MujocoPool, rounds: int, env_steps: int) -> None:
    """Compare the pool with its engine, bare, and with the batches of other libraries that are installed."""
    original, reduced = (  # of the task's own model, and of the pool's (embodied/envs/mujoco/engine.py)
        Batch(model, pool.num_envs, pool.batch.nthread) for model in (pool.task.scene().compile(), pool.model)
    )
    replay = Replay(pool, max(2, env_steps // pool.num_envs), CHUNK)
    peers = {name: built(name, partial(PeerBatch, name.replace("_", "-"), pool)) for name in PEERS}
    engines = {"engine": original, "engine_reduced": reduced} | {name: peer for name, peer in peers.items() if peer}
    found = against_engine(report, replay, engines, rounds)
    report.ratio("pool_over_engine_1024", paired(found["pool"], found["engine"]))
    for side, peer in product(("pool", "engine", "engine_reduced"), found.keys() & peers.keys()):
        report.ratio(f"{side}_over_{peer}", paired(found[side], found[peer]))


class Replay:
    """Record the controls of ``count`` steps of a pool, and replay them from the same states in a bare batch."""

    def __init__(self, pool: MujocoPool | WarpPool, count: int, chunk: int) -> None:
        self.pool, self.count, self.chunk = pool, count, chunk
        self.start: Any = None
        self.live = pool.batch.bind("ctrl")
        self.controls = [copy.deepcopy(self.live) for _ in range(-(-count // chunk) * chunk)]
        self.num_steps = 0  # of them that hold the controls of the latest run

    def record(self, _: object) -> None:
        self.controls[self.num_steps][:] = self.live
        self.num_steps += 1

    def pool_speed(self) -> float:
        """Step the pool and record its controls; return its speed."""
        self.start, self.num_steps = copy.deepcopy(self.pool.batch.state), 0
        self.pool.on_control_step = self.record
        speed = _speed(self.pool, self.count, self.chunk)
        self.pool.on_control_step = None
        return speed

    def engine_speed(self, batch: Batch | WarpBatch | PeerBatch) -> float:
        """Replay the recorded controls in ``batch``, with timers if it simulates gravity; return its speed."""
        if isinstance(batch, PeerBatch):
            seconds = batch.replay(self.start, np.stack(self.controls[: self.num_steps]))
            return self.num_steps * self.pool.num_envs / seconds
        mode: AbstractContextManager[None] = nullcontext()
        if isinstance(batch, WarpBatch):
            batch.load_state(self.start)
            batch.forward()
        else:
            batch.state[:] = self.start
            if batch.model.opt.gravity.any():
                batch.bind("xfrc_applied")[:], mode = 0, timers()  # without the pool's weights

        def loop() -> None:
            ctrl = batch.bind("ctrl")
            for control in self.controls[: self.num_steps]:
                ctrl[:] = control
                batch.step(nstep=self.pool.substeps)
            torch.as_tensor(ctrl).cpu()  # waits for a GPU

        with mode:
            return self.num_steps * self.pool.num_envs / timed(loop)


def against_engine(
    report: Report, replay: Replay, engines: Mapping[str, Batch | WarpBatch | PeerBatch], rounds: int
) -> dict[str, list[float]]:
    """Compare a pool with bare batches, on the same states and controls; return the speeds of all rounds."""
    pool = replay.pool
    prefix, suffix = ("warp_", "") if isinstance(pool, WarpPool) else ("", f"_{pool.num_envs}")
    measures: dict[str, Callable[[], float]] = {"pool": replay.pool_speed}
    measures |= {name: partial(replay.engine_speed, batch) for name, batch in engines.items()}
    settings = {"task": TASK, "num_envs": pool.num_envs, "control_steps": replay.count, "chunk": replay.chunk}
    settings |= {f"mujoco_of_{name}": it.mujoco for name, it in engines.items() if isinstance(it, PeerBatch)}
    return report.measure(measures, rounds, SPEED, settings, f"{prefix}{{}}{suffix}")


def flatness(report: Report, reference: MujocoPool, sizes: tuple[int, ...], rounds: int, env_steps: int) -> None:
    """Compare pools of other sizes with the reference, on parts or copies of its states, for the same steps."""
    ratios = []
    start = reference.state_dict()

    def speed(pool: MujocoPool, parts: Tensor, count: int) -> float:
        executed, seconds = 0.0, 0.0
        for rows in parts:
            pool.load_state_dict({key: value[rows] for key, value in start.items()}, make_sampler(pool))
            part_speed = _speed(pool, count)
            executed, seconds = executed + len(rows), seconds + len(rows) / part_speed
        return executed / seconds

    for num_envs in sizes:
        pool = _pool(TASK, num_envs)
        count = max(CHUNK, min(4 * CHUNK, env_steps // num_envs))
        parts = torch.arange(max(num_envs, reference.num_envs)).view(-1, num_envs) % reference.num_envs
        whole = torch.arange(reference.num_envs)[None]
        measures = {"other": partial(speed, pool, parts, count), "reference": partial(speed, reference, whole, count)}
        results = in_turns(measures, rounds)
        ratios.append(paired(results["other"], results["reference"]))
        settings = _settings(pool) | {"over_reference": round(ratios[-1], 4), "rounds": rounds, "control_steps": count}
        report.add(f"pool_{num_envs}", median(results["other"]), SPEED, **settings)
    report.ratio("pool_flatness_256_8192", min(ratios))


def against_envpool(report: Report, num_envs: int, rounds: int, env_steps: int) -> None:
    """Compare ``lift`` with EnvPool's Panda and cube: same threads, same number of envs, synchronous."""
    pool = _pool(ENVPOOL_PEER, num_envs)
    peer = built("envpool", lambda: adapters.envpool_of(ENVPOOL_ID, num_envs, pool.batch.nthread))
    if peer is None:
        return
    count = env_steps // num_envs
    actions = np.random.default_rng(0).uniform(-1, 1, (count, num_envs, *peer.action_space.shape))
    actions = actions.astype(peer.action_space.dtype)
    measures = {
        "pool_beside_envpool": lambda: _speed(pool, count, 1),
        "envpool": lambda: count * num_envs / timed(lambda: [peer.step(action) for action in actions]),
    }
    results = report.measure(measures, rounds, SPEED, _settings(pool) | {"envpool": ENVPOOL_ID})
    report.ratio("pool_over_envpool", paired(results["pool_beside_envpool"], results["envpool"]))
    peer.close()


def against_warp(
    report: Report, ratio: str, num_envs: int, rounds: int, count: int, chunk: int = 1, device: str = "auto"
) -> None:
    """Compare the pool of ``sim=warp`` with ``WarpBatch.step`` alone."""
    task = TASKS[TASK]
    pool = built("warp", lambda: WarpPool(task.build(task.config()), num_envs=num_envs, sim=WarpConfig(device=device)))
    if pool is not None:
        pool.reset(make_sampler(pool, stagger=True))
        engine = WarpBatch(pool.model, num_envs, pool.device, WarpConfig.max_contacts, WarpConfig.max_constraints)
        found = against_engine(report, Replay(pool, count, chunk), {"engine": engine}, rounds)
        report.ratio(ratio, paired(found["pool"], found["engine"]))


MEMORY = """
import sys, torch
from embodied.envs import make_pool, make_sampler
torch.set_num_threads(1)
num_envs, num_threads = map(int, sys.argv[2:])
pool = make_pool(sys.argv[1], {}, num_envs=num_envs, num_threads=num_threads)
pool.reset(make_sampler(pool, stagger=True))
for _ in range(3):
    pool.step(2 * torch.rand(num_envs, pool.spec.action_dim) - 1)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory(report: Report, num_envs: int) -> None:
    """Measure the peak memory of a new process: interpreter, torch, the pool, three steps."""
    nthread = threads.available_cores()
    words = [sys.executable, "-c", MEMORY, TASK, str(num_envs), str(nthread)]
    gigabytes = int(subprocess.check_output(words, text=True)) * 1024 / 1e9
    report.add(f"rss_gb_{num_envs}", gigabytes, "GB", task=TASK, num_envs=num_envs, num_threads=nthread, peak=True)
    report.ratio("rss_gb_4096", gigabytes)


def _pool(task: str, num_envs: int) -> MujocoPool:
    pool = make_pool(task, {}, num_envs=num_envs, num_threads=threads.available_cores())
    pool.reset(make_sampler(pool, stagger=True))
    return pool


def _speed(pool: MujocoPool | WarpPool, count: int, chunk: int = CHUNK) -> float:
    """Execute at least ``count`` random actions per env; return the speed in executed control steps of all envs."""
    executed, began_s = 0, time.perf_counter()
    for _ in range(-(-count // chunk)):
        action = 2 * torch.rand(pool.num_envs, chunk, pool.spec.action_dim, device=pool.device) - 1
        executed += int(pool.step(action).num_steps_N.sum())
    return executed / (time.perf_counter() - began_s)


def _settings(pool: MujocoPool) -> dict[str, object]:
    return {
        "task": pool.task.name, "num_envs": pool.num_envs, "num_threads": pool.batch.nthread,
        "control_dt_s": pool.spec.control_dt_s, "substeps": pool.substeps,
    }  # fmt: skip
