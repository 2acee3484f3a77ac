"""Speed and memory of the environment pool. All speeds are control steps per second, over all envs.

    pool_over_engine_1024        pool / bare engine, same envs, states and controls (see ``Replay``)
    pool_flatness_256_8192       the smallest, over numbers of envs n, of pool at n / pool at 1,024
    pool_over_envpool            pool / EnvPool's PandaPickCube-v1, if installed; its control step is shorter
    pool_over_async_vector_env   pool / gymnasium's AsyncVectorEnv of our single env
    rss_gb_4096                  greatest resident memory of a process that steps 4,096 envs, GB

Actions are uniform in [-1, 1] and come in chunks of 4, as the default policies execute them; single actions are
measured beside (pool_over_engine_single_actions). Observations, rewards, success, the time limit and resets are part
of a pool's step, and only control steps that were executed count.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from mujoco.batch import Batch
from torch import Tensor

from embodied.benchmarks.measure import Report, in_turns, note, paired, timed
from embodied.runtime import threads
from envs import MujocoPool, make_pool, make_sampler
from envs.views.gymnasium_api import gymnasium_id

TASK = "pick_place"
ENVPOOL_ID, ENVPOOL_PEER = "PandaPickCube-v1", "lift"
CHUNK = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. env_steps: in one measure of a pool. envpool_envs is small because each takes 42 MB."""

    reference: int = 1024
    flatness: tuple[int, ...] = (256, 512, 2048, 4096, 8192)
    env_steps: int = 16_384
    preroll: int = 40
    rounds: int = 9
    rss: int = 4096
    envpool_envs: int = 64
    async_envs: int = 4
    async_steps: int = 200


SHORT = Sizes(
    reference=16, flatness=(8, 32), env_steps=64, preroll=2, rounds=2, rss=32, envpool_envs=4, async_envs=2,
    async_steps=4,
)  # fmt: skip


def measure(short: bool) -> Report:
    """All of the above; ``short`` only shows that it works."""
    sizes = SHORT if short else Sizes()
    report = Report("sim")
    threads.use(1)  # as an env worker does
    reference = _pool(TASK, sizes.reference)
    _walk(reference, sizes.preroll)
    against_engine(report, sizes, reference)
    flatness(report, sizes, reference)
    against_envpool(report, sizes)
    against_async(report, sizes)
    memory(report, sizes)
    return report


class Replay:
    """The pool's steps, and then the same physics in a bare batch: its states at the start and its controls.

    count: control steps of one measure, in chunks of ``chunk``.
    """

    def __init__(self, pool: MujocoPool, count: int, chunk: int) -> None:
        self.pool, self.count, self.chunk = pool, count, chunk
        self.start = pool.batch.state.copy()
        self.controls: list[np.ndarray] = []

    def pool_speed(self) -> float:
        self.controls.clear()
        self.start[:] = self.pool.batch.state
        self.pool.on_control_step = lambda pool: self.controls.append(pool.batch.bind("ctrl").copy())
        speed = _speed(self.pool, self.count, self.chunk)
        self.pool.on_control_step = None
        return speed

    def engine_speed(self, batch: Batch) -> float:
        batch.state[:] = self.start
        return len(self.controls) * self.pool.num_envs / timed(lambda: self._loop(batch))

    def _loop(self, batch: Batch) -> None:
        ctrl = batch.bind("ctrl")
        for control in self.controls:
            ctrl[:] = control
            batch.step(nstep=self.pool.substeps)


def against_engine(report: Report, sizes: Sizes, pool: MujocoPool) -> None:
    """The pool beside ``Batch.step`` and nothing else, on the same states and controls (``Replay``).

    Two bare loops are measured: ``Batch`` as its constructor makes it, which the ratio is to, and ``persistent=True``,
    the kind that the pool uses.
    """
    nthread = pool.batch.nthread
    plain = Batch(pool.model, pool.num_envs, nthread)
    persistent = Batch(pool.model, pool.num_envs, nthread, persistent=True)
    settings = _settings(pool) | {"rounds": sizes.rounds}
    for chunk, suffix in ((CHUNK, ""), (1, "_single_actions")):
        replay = Replay(pool, max(2, sizes.env_steps // pool.num_envs), chunk)
        measures: dict[str, Callable[[], float]] = {
            "pool": replay.pool_speed,
            "engine": partial(replay.engine_speed, plain),
            "engine_persistent": partial(replay.engine_speed, persistent),
        }
        results = in_turns(measures, sizes.rounds)
        extent = settings | {"control_steps": replay.count, "chunk": chunk}
        for name, speeds in results.items():
            report.add(f"{name}_{sizes.reference}{suffix}", float(np.median(speeds)), "control steps/s", **extent)
        ratio = paired(results["pool"], results["engine_persistent"])
        report.add(f"pool_over_engine_persistent{suffix}", ratio, "ratio", **extent)
        ratio = paired(results["pool"], results["engine"])
        if chunk == CHUNK:
            report.ratio("pool_over_engine_1024", ratio)
        else:
            report.add(f"pool_over_engine{suffix}", ratio, "ratio", **extent)


def flatness(report: Report, sizes: Sizes, reference: MujocoPool) -> None:
    """Pools of other sizes in turns with the reference, on the same states: a smaller pool steps them in parts, a
    larger one copies of them; every measure has the same control steps."""
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
        report.add(f"pool_{num_envs}", float(np.median(results["other"])), "control steps/s", **settings)
    report.ratio("pool_flatness_256_8192", min(ratios))


def against_envpool(report: Report, sizes: Sizes) -> None:
    """EnvPool's Panda with a cube beside our ``lift``: same threads, same number of envs, synchronous."""
    if find_spec("envpool") is None:
        note("envpool is not installed: left out (pip install -c constraints.txt -e '.[envpool]')")
        return
    pool = _pool(ENVPOOL_PEER, sizes.envpool_envs)
    count = max(2, sizes.env_steps // pool.num_envs)
    peer = importlib.import_module("envpool").make_gymnasium(
        ENVPOOL_ID, num_envs=pool.num_envs, num_threads=pool.batch.nthread, seed=0
    )
    peer.reset()
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
    report.add("pool_beside_envpool", float(np.median(results["pool"])), "control steps/s", **_settings(pool))
    report.add("envpool", float(np.median(results["envpool"])), "control steps/s", **theirs)
    report.ratio("pool_over_envpool", paired(results["pool"], results["envpool"]))


def against_async(report: Report, sizes: Sizes) -> None:
    """gymnasium's vector env with a process for each env, and its native counterpart of as many envs."""
    name, count, num_envs = gymnasium_id(TASK), sizes.async_steps, sizes.async_envs
    # Processes that are forked from one with threads may hang: spawned ones do not.
    peer = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="async", vector_kwargs={"context": "spawn"})
    native = gymnasium.make_vec(name, num_envs=num_envs, num_threads=threads.available_cores())
    speeds: dict[str, Callable[[], float]] = {}
    for key, env in {"native": native, "async": peer}.items():
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(count)]
        speeds[key] = _stepper(partial(_step_all, env, actions), count * num_envs)
    results = in_turns(speeds, sizes.rounds)
    settings = {"task": name, "num_envs": num_envs, "steps": count, "rounds": sizes.rounds}
    report.add("make_vec_native", float(np.median(results["native"])), "control steps/s", **settings)
    report.add("make_vec_async", float(np.median(results["async"])), "control steps/s", **settings)
    native.close()
    peer.close()
    report.ratio("pool_over_async_vector_env", paired(results["native"], results["async"]))


MEMORY = """
import sys, torch
from envs import make_pool, make_sampler
torch.set_num_threads(1)
num_envs, num_threads = map(int, sys.argv[2:])
pool = make_pool(sys.argv[1], {}, num_envs=num_envs, num_threads=num_threads)
pool.reset(make_sampler(pool, stagger=True))
for _ in range(3):
    pool.step(2 * torch.rand(num_envs, pool.spec.action_dim) - 1)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory(report: Report, sizes: Sizes) -> None:
    """High-water mark of a process of its own: interpreter, torch, the pool, three steps."""
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


def _walk(pool: MujocoPool, count: int, chunk: int = CHUNK) -> int:
    """At least ``count`` control steps with random actions; env steps that were executed."""
    executed = 0
    for _ in range(-(-count // chunk)):
        action = 2 * torch.rand(pool.num_envs, chunk, pool.spec.action_dim) - 1
        executed += int(pool.step(action).num_steps_N.sum())
    return executed


def _speed(pool: MujocoPool, count: int, chunk: int = CHUNK) -> float:
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
