"""A policy outside of the simulator: latency of its bundle, a closed loop in real time, throughput of the server.

    gaussian_p99_ms, flow_p99_ms, vla_tiny_p99_ms   99th percentile of a plan, one row, one core
    missed_share_50hz                               missed deadlines of all ticks of a closed loop at 50 Hz
    server_over_unbatched_<policy>                  requests per second of 16 clients / of 16 clients at max_batch=1
    server_over_one_client_<policy>                 the same / of one client, which asks one request at a time

Policies have random weights: a plan costs the same as a trained one's. What batches give depends on the size of the
policy: a message costs the server as much as a plan of ``flow`` and far less than one of ``flow_wide``. The simulated
arm and the server are processes of their own. Latencies and the loop depend on what else the machine does, so they are
measured in several rounds: ratios are those of the best round, rows have all. ``cpu`` is the time of the planning
thread alone, without its waits.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.benchmarks.measure import Report, in_turns, note, paired
from embodied.deployment.bundle.description import PARITY_FILE, Origin
from embodied.deployment.bundle.files import load_arrays
from embodied.deployment.bundle.format import read_bundle, read_simulation
from embodied.deployment.bundle.runner import OUTPUT_PREFIX, Planner, PolicyRunner
from embodied.deployment.bundle.write import write_bundle
from embodied.deployment.control.inference import Inference, RealClock
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Limits, Safety
from embodied.deployment.robots.sim import SimRobot
from embodied.deployment.serving.client import RemotePlanner
from embodied.session.config import compose_run
from embodied.session.exporting import bundle_source
from embodied.session.factories import build_policy, make_policy, make_spec

POLICIES: dict[str, dict[str, object]] = {
    "gaussian": {"task": "pick_place", "policy": "gaussian"},
    "flow": {"task": "pick_place", "policy": "flow"},
    "flow_wide": {"task": "pick_place", "policy": "flow", "policy.head_hidden": [2048, 2048, 2048, 2048]},
    "vla_tiny": {"task": "tabletop", "policy": "vla_tiny"},
}
"""Options of each policy. The denoiser of flow_wide has 13 million weights, more than the caches of a core hold."""
CLIENTS = 16
LOOP_HZ = 50

Inputs = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    rounds: int = 5
    """Rounds that count, see measure.py."""
    plans: int = 500
    """Plans per policy and round."""
    loop_steps: int = 500
    """Control steps of the closed loop per round."""
    requests: int = 640
    """Requests per server and round."""
    policies: tuple[str, ...] = ("gaussian", "flow", "vla_tiny")
    """Policies whose latency is measured."""
    served: tuple[str, ...] = ("flow", "flow_wide", "vla_tiny")
    """Policies whose server is measured."""


def measure(short: bool) -> Report:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    sizes = Sizes(2, 5, 10, 32, ("flow",), ("flow",)) if short else Sizes()
    report = Report("deploy")
    with TemporaryDirectory() as folder:
        bundles = {name: Path(folder) / name for name in dict.fromkeys(sizes.policies + sizes.served)}
        for name, path in bundles.items():
            note(f"exporting {name}")
            export_random(path, POLICIES[name])
        latency(report, sizes, {name: bundles[name] for name in sizes.policies})
        closed_loop(report, sizes, Path(folder) / "loop")
        for name in sizes.served:
            throughput(report, sizes, name, bundles[name])
    return report


def export_random(path: Path, options: dict[str, object]) -> None:
    """Write the bundle of a policy with random weights."""
    config = compose_run({"device": "cpu", **options})
    torch.manual_seed(0)
    policy = make_policy(config, make_spec(config))
    path.mkdir()
    origin = Origin(str(options["task"]), str(options["policy"]), "", "", 0, None, {})
    write_bundle(path, bundle_source(config, policy, origin, 2), build_policy)


def rows_of(path: Path) -> list[Inputs]:
    """Return the recorded inputs of a bundle, one row each."""
    arrays = load_arrays(path / PARITY_FILE)
    count = len(arrays["state"])
    return [
        {name: value[i : i + 1] for name, value in arrays.items() if not name.startswith(OUTPUT_PREFIX)}
        for i in range(count)
    ]


# -- latency -----------------------------------------------------------------------------------------------------------
def latency(report: Report, sizes: Sizes, bundles: dict[str, Path]) -> None:
    """Measure how long a plan takes, by policy, in rounds."""
    wall: dict[str, list[NDArray[np.float64]]] = {name: [] for name in bundles}
    cpu: dict[str, list[NDArray[np.float64]]] = {name: [] for name in bundles}

    def plan(name: str, runner: Planner, rows: list[Inputs]) -> float:
        times = np.empty((2, sizes.plans))
        for i in range(sizes.plans):
            began = time.perf_counter(), time.thread_time()
            runner.plan(rows[i % len(rows)])
            times[:, i] = time.perf_counter() - began[0], time.thread_time() - began[1]
        wall[name].append(times[0])
        cpu[name].append(times[1])
        return float(np.percentile(times[0], 99))

    measures = {name: partial(plan, name, PolicyRunner(path), rows_of(path)) for name, path in bundles.items()}
    results = in_turns(measures, sizes.rounds)
    for name, path in bundles.items():
        settings = {**POLICIES[name], "plans": sizes.plans, "rounds": sizes.rounds, "threads": 1}
        best = wall[name][1:][int(np.argmin(results[name]))]
        for q in (50, 99):
            report.add(f"{name}_p{q}", 1e3 * float(np.percentile(best, q)), "ms", **settings)
            report.add(f"{name}_p{q}_all_rounds", 1e3 * float(np.percentile(wall[name][1:], q)), "ms", **settings)
            report.add(f"{name}_p{q}_cpu", 1e3 * float(np.percentile(cpu[name][1:], q)), "ms", **settings)
        bundle = read_bundle(path)
        report.add(f"{name}_inputs", bundle.state_dim, "numbers", cameras=len(bundle.cameras), horizon=bundle.horizon)
        report.ratio(f"{name}_p99_ms", 1e3 * min(results[name]))


# -- closed loop -------------------------------------------------------------------------------------------------------
def closed_loop(report: Report, sizes: Sizes, path: Path) -> None:
    """Measure the missed deadlines of the flow policy at 50 Hz on the simulated arm."""
    export_random(path, POLICIES["flow"] | {"task.control_dt_s": 1 / LOOP_HZ, "task.max_episode_steps": 50})
    bundle = read_bundle(path)
    simulation = read_simulation(path)
    shares, rates, latencies = [], [], list[float]()
    with SimRobot(bundle, simulation) as robot:
        clock = RealClock()
        inference = Inference(PolicyRunner(path), clock)
        for number in range(sizes.rounds + 1):
            robot.reset(0, number)
            safety = Safety(bundle.arm, Limits.of(bundle.arm))
            loop = ControlLoop(bundle, robot, inference, safety, clock, schedule="rtc")
            found = loop.run(steps=sizes.loop_steps)
            if number > 0:
                shares.append(found.missed_deadlines / (found.ticks + found.missed_deadlines))
                rates.append(found.rate_hz)
                latencies += found.latencies_s
        inference.close()
    settings = {"steps": sizes.loop_steps, "schedule": "rtc", "of_rounds": [round(share, 5) for share in shares]}
    report.add("loop_missed_share", median(shares), "share", **settings)
    report.add("loop_rate", rates[int(np.argmin(shares))], "Hz", of_rounds=[round(rate, 3) for rate in rates])
    report.add("loop_latency_p99", 1e3 * float(np.percentile(latencies, 99)), "ms")
    report.ratio("missed_share_50hz", min(shares))


# -- server ------------------------------------------------------------------------------------------------------------
def throughput(report: Report, sizes: Sizes, name: str, path: Path) -> None:
    """Measure requests per second of one client and of CLIENTS clients, with and without batches."""
    rows = rows_of(path)
    with ExitStack() as stack:
        batched, unbatched = (stack.enter_context(serving(path, size)) for size in (2 * CLIENTS, 1))
        measures: dict[str, Callable[[], float]] = {
            "batched": partial(ask, batched, path, rows, CLIENTS, sizes.requests),
            "unbatched": partial(ask, unbatched, path, rows, CLIENTS, sizes.requests),
            "one_client": partial(ask, batched, path, rows, 1, max(1, sizes.requests // 4)),
        }
        results = in_turns(measures, sizes.rounds)
    for what, values in results.items():
        clients = 1 if what == "one_client" else CLIENTS
        rounds = [round(value, 1) for value in values]
        settings = {**POLICIES[name], "clients": clients, "of_rounds": rounds}
        report.add(f"server_{name}_{what}", median(values), "requests/s", **settings)
    for what in ("unbatched", "one_client"):
        report.ratio(f"server_over_{what}_{name}", paired(results["batched"], results[what]))


@contextmanager
def serving(path: Path, max_batch: int) -> Iterator[str]:
    """Yield the address of a server of a bundle in a process of its own."""
    words = [f"bundle={path}", "port=0", f"max_batch={max_batch}", f"max_clients={4 * CLIENTS}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied.serve", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.match(r"listening on (ws://\S+)$", line)
            if found:
                break
        else:
            raise RuntimeError("the server ended without listening")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def ask(address: str, path: Path, rows: list[Inputs], clients: int, requests: int) -> float:
    """Return the requests per second of ``clients`` clients, each in a thread, which share ``requests``."""
    bundle = read_bundle(path)
    planners = [RemotePlanner(address, bundle=bundle, timeout_s=60.0) for _ in range(clients)]
    each, ready = -(-requests // clients), threading.Barrier(clients + 1)

    def work(planner: RemotePlanner, first: int) -> None:
        planner.plan(rows[first % len(rows)])
        ready.wait()
        for i in range(each):
            planner.plan(rows[(first + i) % len(rows)])

    threads = [threading.Thread(target=work, args=(planner, 5 * i)) for i, planner in enumerate(planners)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for planner in planners:
        planner.close()
    return clients * each / seconds
