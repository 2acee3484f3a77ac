"""What more workers would give, by the model of plant.py: a model with assumed inputs, no measurement.

    async_over_sync_<workers>    max_staleness=1 with order=arrival / max_staleness=0; async4: max_staleness=4
    async_over_bound_<workers>   the same / bound: no worker ever waits
    one_learner_<workers>        async_over_sync with a learner that does not grow with the workers
    pool_<sigma>_<n>             speedup of a system whose generation and training share one pool of devices, n
                                 responses at a time

**Workers.** Each has a machine of its own. Assumed: steps as in scenario (b) of ``bench async`` (lognormal, sigma = 1),
an actor server for 100 workers whose call takes 2 ms and 20 µs per request, and a learner that grows with the batch, so
that an update always takes the same time. ``one_learner``: an update takes 1 ms per fragment. Actor servers merge
requests in all modes, with max_staleness=0 too, where the runtimes here do not.

**Pool.** Synchronous: all devices generate until the longest response is complete, then all train. Asynchronous: a
share phi of the devices generates and the others train at the same time, so generation takes 1/phi and an update
1/(1 - phi) of the time; phi = C / (C + U) balances them, with C the mean time of generation and U that of the update on
all devices. Then nothing is gained but the waiting for the longest response: with t the longest response over the mean,

    speedup <= (t C + U) / (C + U)

This is the arithmetic behind speedups that AReaL (2.57), AsyncFlow (1.59 on average) and LlamaRL (growing with the
model, 10.7 at most) report. Their papers are the source of these figures only; what they measured also contains other
improvements, and the tails of their responses are assumed here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from embodied.benchmarks.asynchrony import TAIL
from embodied.benchmarks.latency import Latency
from embodied.benchmarks.measure import Report
from embodied.benchmarks.plant import Model, Plant, Prediction, Times

WORKERS = (10, 100, 1_000, 15_000)
MODES: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0},
    "ticket": {"max_staleness": 1},
    "async": {"max_staleness": 1, "order": "arrival"},
    "async4": {"max_staleness": 4, "order": "arrival"},
}
FRAGMENT_S = 1e-3
PER_SERVER = 100
TAILS = (0.25, 0.5, 1.0)
RESPONSES = (16, 64, 256, 1_024)
UPDATE_SHARE = 0.25  # of generation and update together, where both share a pool
SPEEDUPS = {
    "AReaL": (2.57, "up to 2.57 times the best synchronous systems: Fu et al. 2025, arXiv 2505.24298v1"),
    "AsyncFlow": (1.59, "1.59 times the baseline on average: Han et al. 2025, arXiv 2507.01663"),
    "LlamaRL": (10.7, "up to 10.7 times at 405B parameters, growing with the model: Wu et al. 2025, arXiv 2505.24034"),
}


def measure(short: bool) -> Report:
    """Run the model; ``short`` only shows that it works."""
    report = Report("scale")
    for workers in (4, 8) if short else WORKERS:
        measure_workers(report, workers)
    for sigma in TAILS:
        for number in (4, 8) if short else RESPONSES:
            measure_pool(report, sigma, number)
    for system, (speedup, figure) in SPEEDUPS.items():
        tail = (speedup - UPDATE_SHARE) / (1 - UPDATE_SHARE)
        report.add(f"tail_for_{system}", tail, "longest / mean response", update_share=UPDATE_SHARE, published=figure)
    return report


def measure_workers(report: Report, workers: int) -> None:
    """Add what that many workers give in every mode, and with one learner that does not grow."""
    collect_s = TAIL.decisions * TAIL.step.mean_s
    found: dict[str, float] = {}
    for mode, options in MODES.items():
        prediction = simulate(workers, options, TAIL.update_s)
        found[mode] = collect_s / prediction.useful_batch_s
        report.add(
            f"{mode}_{workers}", found[mode], "share of the bound", batch_s=prediction.batch_s, used=prediction.used,
            staleness=prediction.staleness_mean, **options, **inputs(workers), update_s=TAIL.update_s,
        )  # fmt: skip
    for mode in ("async", "async4"):
        report.ratio(f"{mode}_over_sync_{workers}", found[mode] / found["sync"])
    report.ratio(f"async_over_bound_{workers}", found["async"])
    update_s = workers * FRAGMENT_S
    alone = {mode: simulate(workers, MODES[mode], update_s).useful_batch_s for mode in ("sync", "async")}
    report.ratio(f"one_learner_{workers}", alone["sync"] / alone["async"])


def simulate(workers: int, options: Mapping[str, Any], update_s: float) -> Prediction:
    """Run the model of that many workers, with an actor server for every ``PER_SERVER``."""
    rng = random.Random(workers)
    draws = TAIL.step.stream(rng.random())
    servers = max(1, workers // PER_SERVER)
    times = Times(
        step=lambda group: next(draws),
        infer=lambda acting, valued: 2e-3 + 2e-5 * (acting + valued),
        update=lambda: update_s,
    )
    plant = Plant(workers, decisions=TAIL.decisions, servers=servers, **options)
    return Model(plant, times).run(*_batches(workers))


def measure_pool(report: Report, sigma: float, number: int) -> None:
    """Add the speedup of a shared pool with ``number`` responses in a batch, each a decision of a worker.

    A unit of time is generation and update on all devices, without waiting.
    """
    update, collect = UPDATE_SHARE, 1 - UPDATE_SHARE
    together_s = pool_batch_s(MODES["sync"], number, Latency(collect, sigma), update)
    apart_s = pool_batch_s(MODES["async4"], number, Latency(1.0, sigma), 1.0)  # phi = collect
    report.ratio(f"pool_{sigma}_{number}", together_s / apart_s)
    report.add(
        f"pool_tail_{sigma}_{number}", (together_s - update) / collect, "longest / mean response", sigma=sigma,
        responses=number, update_share=update, async_batch=apart_s,
    )  # fmt: skip


def pool_batch_s(options: Mapping[str, Any], number: int, response: Latency, update: float) -> float:
    """Return the time of a batch of responses that count."""
    draws = response.stream(number)
    times = Times(step=lambda group: next(draws), infer=lambda acting, valued: 0.0, update=lambda: update)
    return Model(Plant(number, decisions=1, **options), times).run(*_batches(number)).useful_batch_s


def inputs(workers: int) -> dict[str, Any]:
    """Return the assumed inputs."""
    return {
        "workers": workers, "decisions": TAIL.decisions, "step_mean_s": TAIL.step.mean_s, "sigma": TAIL.step.sigma,
        "workers_per_server": PER_SERVER, "infer_s": "0.002 + 0.00002 per request",
    }  # fmt: skip


def _batches(workers: int) -> tuple[int, int]:
    """Return how many batches count, and before that warm up: fewer of more workers, whose means vary less."""
    return max(4, min(200, 20_000 // workers)), 6 if workers <= 1_000 else 3
