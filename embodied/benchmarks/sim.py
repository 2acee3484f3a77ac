"""Speed and memory of the environment pool. All speeds are control steps per second, over all envs.

    pool_over_engine_1024        pool / bare engine, same envs, states and controls (see ``Replay``)
    pool_flatness_256_8192       pool with n envs / pool with 1,024 envs, the smallest over n
    pool_over_envpool            pool / EnvPool's PandaPickCube-v1, if installed; its control step is shorter
    pool_over_async_vector_env   pool / gymnasium's AsyncVectorEnv of our single env
    warp_pool_over_engine        pool of sim=warp / the recorded kernels of MuJoCo Warp alone, as above, 64 envs
    <family>_adapter_over_bare   see embodied/benchmarks/adapters.py
    rss_gb_4096                  peak resident memory of a process that steps 4,096 envs, GB

Actions are uniform in [-1, 1], in chunks of 4 as the default policies execute them. The row
pool_over_engine_single_actions is for single actions. A pool's step includes observations, rewards, success, the time
limit and resets; only control steps that were executed count.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from mujoco.batch import Batch
from torch import Tensor

from embodied.benchmarks import adapters
from embodied.benchmarks.measure import Report, built, in_turns, paired, timed
from embodied.envs import TASKS, MujocoPool, SamplerSetup, UniformConfig, UniformSampler, make_pool, make_sampler
from embodied.envs.mujoco.warp.batch import WarpBatch
from embodied.envs.mujoco.warp.pool import WarpConfig, WarpPool
from embodied.envs.views.gymnasium_api import gymnasium_id
from embodied.runtime import threads

TASK = "pick_place"
ENVPOOL_ID, ENVPOOL_PEER = "PandaPickCube-v1", "lift"
CHUNK = 4
SPEED = "control steps/s"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    reference: int = 1024
    """Envs of the reference pool."""
    flatness: tuple[int, ...] = (256, 512, 2048, 4096, 8192)
    """Envs of the pools that are compared with the reference."""
    env_steps: int = 16_384
    """Control steps, over all envs, in one measure of a pool."""
    preroll: int = 40
    """Control steps before the first measure."""
    rounds: int = 9
    """Rounds that count, see measure.py."""
    warp_envs: int = 64
    """Envs of MuJoCo Warp, which is slow on a CPU."""
    warp_steps: int = 16
    """Control steps per env in one measure of MuJoCo Warp."""
    rss: int = 4096
    """Envs for the memory."""
    envpool_envs: int = 64
    """Envs of EnvPool, few because each takes 42 MB."""
    async_envs: int = 4
    """Envs of AsyncVectorEnv."""
    async_steps: int = 200
    """Control steps per env in one measure of AsyncVectorEnv."""


SHORT = Sizes(
    reference=16, flatness=(8, 32), env_steps=64, preroll=2, rounds=2, rss=32, envpool_envs=4, async_envs=2,
    async_steps=4, warp_envs=2, warp_steps=2,
)  # fmt: skip


def measure(short: bool) -> Report:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    sizes = SHORT if short else Sizes()
    report = Report("sim")
    threads.use(1)  # as an env worker does
    reference = _pool(TASK, sizes.reference)
    _walk(reference, sizes.preroll)
    against_engine(report, sizes, reference)
    flatness(report, sizes, reference)
    against_envpool(report, sizes)
    against_async(report, sizes)
    against_warp(report, sizes)
    adapters.measure(report, short)
    memory(report, sizes)
    return report


class Replay:
    """Record the controls of a pool's steps, and replay them from the same states in a bare batch.

    count: control steps per env in one measure. chunk: actions per step of the pool.
    """

    def __init__(self, pool: MujocoPool | WarpPool, count: int, chunk: int) -> None:
        self.pool, self.count, self.chunk = pool, count, chunk
        self.start: Any = None
        self.controls: list[Any] = []

    def pool_speed(self) -> float:
        """Step the pool and record its controls; return its speed."""
        self.controls.clear()
        self.start = copy.deepcopy(self.pool.batch.state)
        self.pool.on_control_step = lambda _: self.controls.append(copy.deepcopy(self.pool.batch.bind("ctrl")))
        speed = _speed(self.pool, self.count, self.chunk)
        self.pool.on_control_step = None
        return speed

    def engine_speed(self, batch: Batch | WarpBatch) -> float:
        """Replay the recorded controls in ``batch``; return its speed."""
        if isinstance(batch, WarpBatch):
            batch.load_state(self.start)
            batch.forward()
        else:
            batch.state[:] = self.start
        return len(self.controls) * self.pool.num_envs / timed(lambda: self._loop(batch))

    def _loop(self, batch: Batch | WarpBatch) -> None:
        ctrl = batch.bind("ctrl")
        for control in self.controls:
            ctrl[:] = control
            batch.step(nstep=self.pool.substeps)


def against_engine(report: Report, sizes: Sizes, pool: MujocoPool) -> None:
    """Compare the pool with ``Batch.step`` alone, on the same states and controls (``Replay``).

    There are two bare batches: one with the constructor's defaults, which the ratio is to, and one with
    ``persistent=True``, as the pool's.
    """
    nthread = pool.batch.nthread
    plain = Batch(pool.model, pool.num_envs, nthread)
    persistent = Batch(pool.model, pool.num_envs, nthread, persistent=True)
    for chunk, suffix in ((CHUNK, ""), (1, "_single_actions")):
        replay = Replay(pool, max(2, sizes.env_steps // pool.num_envs), chunk)
        measures: dict[str, Callable[[], float]] = {
            "pool": replay.pool_speed,
            "engine": partial(replay.engine_speed, plain),
            "engine_persistent": partial(replay.engine_speed, persistent),
        }
        extent = _settings(pool) | {"control_steps": replay.count, "chunk": chunk}
        results = report.measure(measures, sizes.rounds, SPEED, extent, f"{{}}_{sizes.reference}{suffix}")
        extent |= {"rounds": sizes.rounds}
        ratio = paired(results["pool"], results["engine_persistent"])
        report.add(f"pool_over_engine_persistent{suffix}", ratio, "ratio", **extent)
        ratio = paired(results["pool"], results["engine"])
        if chunk == CHUNK:
            report.ratio("pool_over_engine_1024", ratio)
        else:
            report.add(f"pool_over_engine{suffix}", ratio, "ratio", **extent)


def flatness(report: Report, sizes: Sizes, reference: MujocoPool) -> None:
    """Compare pools of other sizes with the reference, on the same states and for the same control steps.

    A smaller pool steps the reference's states in parts, a larger pool steps copies of them.
    """
    ratios = []
    start = reference.state_dict()
    for num_envs in sizes.flatness:
        pool = _pool(TASK, num_envs)
        count = max(CHUNK, min(4 * CHUNK, sizes.env_steps // num_envs))
        parts = torch.arange(max(num_envs, reference.num_envs)).view(-1, num_envs) % reference.num_envs

        def speed(pool: MujocoPool, parts: Tensor, count: int = count) -> float:
            executed, seconds = 0.0, 0.0
            for rows in parts:
                pool.load_state_dict({key: value[rows] for key, value in start.items()}, make_sampler(pool))
                part_speed = _speed(pool, count)
                executed, seconds = executed + len(rows), seconds + len(rows) / part_speed
            return executed / seconds

        whole = torch.arange(reference.num_envs)[None]
        measures = {"other": partial(speed, pool, parts), "reference": partial(speed, reference, whole)}
        results = in_turns(measures, sizes.rounds)
        ratios.append(paired(results["other"], results["reference"]))
        settings = _settings(pool) | {"over_reference": round(ratios[-1], 4), "rounds": sizes.rounds}
        settings |= {"control_steps": count}
        report.add(f"pool_{num_envs}", float(np.median(results["other"])), SPEED, **settings)
    report.ratio("pool_flatness_256_8192", min(ratios))


def against_envpool(report: Report, sizes: Sizes) -> None:
    """Compare ``lift`` with EnvPool's Panda and cube: same threads, same number of envs, synchronous."""
    pool = _pool(ENVPOOL_PEER, sizes.envpool_envs)
    count = max(2, sizes.env_steps // pool.num_envs)
    peer = built("envpool", lambda: _envpool(pool.num_envs, pool.batch.nthread))
    if peer is None:
        return
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (count, pool.num_envs, *peer.action_space.shape)).astype(peer.action_space.dtype)
    peer_speed = _stepper(lambda: [peer.step(action) for action in actions], count * pool.num_envs)
    results = in_turns({"pool": lambda: _speed(pool, count, 1), "envpool": peer_speed}, sizes.rounds)
    timing = peer.spec.config
    peer.close()
    theirs = {
        "task": ENVPOOL_ID, "num_envs": pool.num_envs, "num_threads": pool.batch.nthread,
        "control_dt_s": timing.ctrl_dt, "substeps": round(timing.ctrl_dt / timing.sim_dt), "rounds": sizes.rounds,
    }  # fmt: skip
    report.add("pool_beside_envpool", float(np.median(results["pool"])), SPEED, **_settings(pool))
    report.add("envpool", float(np.median(results["envpool"])), SPEED, **theirs)
    report.ratio("pool_over_envpool", paired(results["pool"], results["envpool"]))


def _envpool(num_envs: int, num_threads: int) -> Any:
    peer = importlib.import_module("envpool").make_gymnasium(
        ENVPOOL_ID, num_envs=num_envs, num_threads=num_threads, seed=0
    )
    peer.reset()
    return peer


def against_async(report: Report, sizes: Sizes) -> None:
    """Compare our native vector env with gymnasium's, which has a process per env, for the same number of envs."""
    name, count, num_envs = gymnasium_id(TASK), sizes.async_steps, sizes.async_envs
    # Processes that are forked from a process with threads may hang; spawned ones do not.
    peer = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="async", vector_kwargs={"context": "spawn"})
    native = gymnasium.make_vec(name, num_envs=num_envs, num_threads=threads.available_cores())
    speeds: dict[str, Callable[[], float]] = {}
    for key, env in {"native": native, "async": peer}.items():
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(count)]
        speeds[key] = _stepper(partial(_step_all, env, actions), count * num_envs)
    settings = {"task": name, "num_envs": num_envs, "steps": count}
    results = report.measure(speeds, sizes.rounds, SPEED, settings, "make_vec_{}")
    native.close()
    peer.close()
    report.ratio("pool_over_async_vector_env", paired(results["native"], results["async"]))


def against_warp(report: Report, sizes: Sizes) -> None:
    """Compare the pool of ``sim=warp`` with ``WarpBatch.step`` alone, on the same states and controls (``Replay``)."""
    task = TASKS[TASK]
    pool = built("warp", lambda: WarpPool(task.build(task.config()), num_envs=sizes.warp_envs))
    if pool is None:
        return
    pool.reset(UniformSampler(pool.spec, UniformConfig(), SamplerSetup(pool.num_envs, stagger=True)))
    engine = WarpBatch(pool.model, pool.num_envs, pool.device, WarpConfig.max_contacts, WarpConfig.max_constraints)
    replay = Replay(pool, sizes.warp_steps, chunk=1)
    measures: dict[str, Callable[[], float]] = {
        "pool": replay.pool_speed,
        "engine": partial(replay.engine_speed, engine),
    }
    settings = {"task": TASK, "num_envs": pool.num_envs, "device": pool.device.type, "control_steps": replay.count}
    results = report.measure(measures, sizes.rounds, SPEED, settings, "warp_{}")
    report.ratio("warp_pool_over_engine", paired(results["pool"], results["engine"]))


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


def memory(report: Report, sizes: Sizes) -> None:
    """Measure the peak memory of a new process: interpreter, torch, the pool, three steps."""
    nthread = threads.available_cores()
    words = [sys.executable, "-c", MEMORY, TASK, str(sizes.rss), str(nthread)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    gigabytes = int(done.stdout) * 1024 / 1e9
    report.add(f"rss_gb_{sizes.rss}", gigabytes, "GB", task=TASK, num_envs=sizes.rss, num_threads=nthread, peak=True)
    report.ratio("rss_gb_4096", gigabytes)


def _pool(task: str, num_envs: int) -> MujocoPool:
    pool = make_pool(task, {}, num_envs=num_envs, num_threads=threads.available_cores())
    pool.reset(make_sampler(pool, stagger=True))
    return pool


def _walk(pool: MujocoPool | WarpPool, count: int, chunk: int = CHUNK) -> int:
    """Execute at least ``count`` random actions per env; return the control steps of all envs that were executed."""
    executed = 0
    for _ in range(-(-count // chunk)):
        action = 2 * torch.rand(pool.num_envs, chunk, pool.spec.action_dim) - 1
        executed += int(pool.step(action).num_steps_N.sum())
    return executed


def _speed(pool: MujocoPool | WarpPool, count: int, chunk: int = CHUNK) -> float:
    executed: list[int] = []
    seconds = timed(lambda: executed.append(_walk(pool, count, chunk)))
    return executed[0] / seconds


def _step_all(env: VectorEnv[Any, Any, Any], actions: Sequence[Any]) -> None:
    for action in actions:
        env.step(action)


def _stepper(work: Callable[[], object], env_steps: int) -> Callable[[], float]:
    return lambda: env_steps / timed(work)


def _settings(pool: MujocoPool) -> dict[str, object]:
    return {
        "task": pool.task.name, "num_envs": pool.num_envs, "num_threads": pool.batch.nthread,
        "control_dt_s": pool.spec.control_dt_s, "substeps": pool.substeps,
    }  # fmt: skip
