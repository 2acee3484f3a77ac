"""A policy outside of the simulator: latency of its bundle, a closed loop in real time, throughput of the server.

    <policy>_p99_ms                      99th percentile of a plan, one row, one thread
    missed_share_50hz                    missed deadlines of all ticks of a closed loop at 50 Hz
    server_over_unbatched_<policy>       requests per second of 16 clients / of 16 clients at max_batch=1
    server_over_one_client_<policy>      the same / of one client, which sends one request at a time

Policies have random weights. The simulated arm and the server are processes of their own. Latencies and the loop
depend on what else the machine does: ratios are those of the best round.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.benchmarks.measure import Report, in_turns, note, paired, timed
from embodied.deployment.bundle.description import PARITY_FILE, Origin
from embodied.deployment.bundle.format import load_arrays, read_bundle, read_simulation
from embodied.deployment.bundle.runner import OUTPUT_PREFIX, Planner, PolicyRunner
from embodied.deployment.control.inference import Clock, Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Safety
from embodied.deployment.robots.sim import SimRobot
from embodied.deployment.serving.client import RemotePlanner
from embodied.session.config import compose_run
from embodied.session.deployed.exporting import bundle_source, export_bundle
from embodied.session.factories import make_policy, make_spec

Inputs = dict[str, NDArray[Any]]
POLICIES: dict[str, dict[str, object]] = {
    "gaussian": {"task": "pick_place", "policy": "gaussian"},
    "flow": {"task": "pick_place", "policy": "flow"},
    "flow_wide": {"task": "pick_place", "policy": "flow", "policy.head_hidden": [2048, 2048, 2048, 2048]},
    "vla_tiny": {"task": "tabletop", "policy": "vla_tiny"},
}
"""Options of each policy. The denoiser of flow_wide has 13 million weights, more than the caches of a core hold."""
PLANNED, SERVED = ("gaussian", "flow", "vla_tiny"), ("flow", "flow_wide", "vla_tiny")
CLIENTS, LOOP_HZ = 16, 50


def measure(report: Report, short: bool) -> None:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    rounds = 2 if short else 5
    with TemporaryDirectory() as folder:
        names = ("flow",) if short else tuple(POLICIES)
        bundles = {name: _export(Path(folder) / name, POLICIES[name]) for name in names}
        latency(report, rounds, 5 if short else 500, {name: path for name, path in bundles.items() if name in PLANNED})
        looped = POLICIES["flow"] | {"task.control_dt_s": 1 / LOOP_HZ, "task.max_episode_steps": 50}
        closed_loop(report, rounds, 10 if short else 500, _export(Path(folder) / "loop", looped))
        for name in (name for name in SERVED if name in bundles):
            throughput(report, rounds, 32 if short else 640, name, bundles[name])


def _export(path: Path, options: dict[str, object]) -> Path:
    """Write the bundle of a policy with random weights."""
    note(f"exporting {path.name}")
    config = compose_run({"device": "cpu", **options})
    torch.manual_seed(0)
    policy = make_policy(config, make_spec(config))
    path.mkdir()
    origin = Origin(str(options["task"]), str(options["policy"]), "", "", 0, None, {})
    export_bundle(path, bundle_source(config, policy, origin, 2))
    return path


def _inputs(path: Path) -> list[Inputs]:
    """Return the recorded inputs of a bundle, one row each."""
    arrays = {k: v for k, v in load_arrays(path / PARITY_FILE).items() if not k.startswith(OUTPUT_PREFIX)}
    return [{name: value[i : i + 1] for name, value in arrays.items()} for i in range(len(arrays["state"]))]


def latency(report: Report, rounds: int, plans: int, bundles: dict[str, Path]) -> None:
    """Measure how long a plan takes, by policy, in rounds."""

    def seconds(runner: Planner, rows: list[Inputs]) -> NDArray[np.float64]:
        return np.array([timed(partial(runner.plan, rows[i % len(rows)])) for i in range(plans)])

    measures = {name: partial(seconds, PolicyRunner(path), _inputs(path)) for name, path in bundles.items()}
    for name, results in in_turns(measures, rounds).items():
        settings = {**POLICIES[name], "plans": plans, "rounds": rounds, "threads": 1}
        best = min(results, key=lambda times: float(np.percentile(times, 99)))
        for q in (50, 99):
            report.add(f"{name}_p{q}", 1e3 * float(np.percentile(best, q)), "ms", **settings)
            report.add(f"{name}_p{q}_all_rounds", 1e3 * float(np.percentile(results, q)), "ms", **settings)
        report.ratio(f"{name}_p99_ms", 1e3 * float(np.percentile(best, 99)))


def closed_loop(report: Report, rounds: int, steps: int, path: Path) -> None:
    """Measure the missed deadlines of the flow policy at 50 Hz on the simulated arm."""
    bundle, shares, rates = read_bundle(path), list[float](), list[float]()
    with SimRobot(bundle, read_simulation(path)) as robot:
        inference = Inference(PolicyRunner(path), Clock())
        for number in range(rounds + 1):  # the first one does not count
            robot.reset(0, number)
            found = ControlLoop(bundle, robot, inference, Safety(bundle.arms), schedule="rtc").run(steps=steps)
            if number > 0:
                shares.append(found.missed_deadlines / (found.ticks + found.missed_deadlines))
                rates.append(found.ticks / found.duration_s)
        inference.close()
    of_rounds = [round(share, 5) for share in shares]
    report.add("loop_missed_share", median(shares), "share", steps=steps, schedule="rtc", of_rounds=of_rounds)
    report.add("loop_rate", max(rates), "Hz", of_rounds=[round(rate, 3) for rate in rates])
    report.ratio("missed_share_50hz", min(shares))


def throughput(report: Report, rounds: int, requests: int, name: str, path: Path) -> None:
    """Measure requests per second of one client and of CLIENTS clients, with and without batches."""
    with ExitStack() as stack:
        batched, unbatched = (stack.enter_context(_serving(path, size)) for size in (2 * CLIENTS, 1))
        measures = {
            "batched": partial(_requests_per_s, batched, path, CLIENTS, requests),
            "unbatched": partial(_requests_per_s, unbatched, path, CLIENTS, requests),
            "one_client": partial(_requests_per_s, batched, path, 1, requests // 4),
        }
        results = in_turns(measures, rounds)
    for what, values in results.items():
        clients = 1 if what == "one_client" else CLIENTS
        settings = POLICIES[name] | {"clients": clients, "rounds": rounds}
        report.add(f"server_{name}_{what}", median(values), "requests/s", **settings)
    for what in ("unbatched", "one_client"):
        report.ratio(f"server_over_{what}_{name}", paired(results["batched"], results[what]))


@contextmanager
def _serving(path: Path, max_batch: int) -> Iterator[str]:
    """Yield the address of a server of a bundle in a process of its own."""
    words = [f"bundle={path}", "port=0", f"max_batch={max_batch}", f"max_clients={4 * CLIENTS}"]
    command = [sys.executable, "-m", "embodied.serve", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next(filter(None, (re.match(r"listening on (ws://\S+)$", line) for line in process.stderr)), None)
        if found is None:
            raise RuntimeError("the server ended without listening")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def _requests_per_s(address: str, path: Path, clients: int, requests: int) -> float:
    """Return the requests per second of ``clients`` clients, each in a thread, which share ``requests``."""
    bundle, rows, each = read_bundle(path), _inputs(path), -(-requests // clients)
    with ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
        planners = [RemotePlanner(address, bundle=bundle, timeout_s=60.0) for _ in range(clients)]
        for planner in planners:
            stack.callback(planner.close)
            planner.plan(rows[0])

        def work(planner: RemotePlanner) -> None:
            for i in range(each):
                planner.plan(rows[i % len(rows)])

        return clients * each / timed(lambda: list(pool.map(work, planners)))
