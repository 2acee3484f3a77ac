"""Measures in turns, so that ratios are valid even if other programs use the machine.

round 1: a b c   round 2: c b a   ...      a ratio is the median over rounds of a / b within a round
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from embodied.core.algorithm import Metrics
from embodied.core.errors import UserError, one_line
from embodied.report.metrics import write_json
from embodied.runtime.loop import Runtime
from embodied.session.command import interrupt_on_signals
from embodied.session.files import read_json
from embodied.session.results.machine import machine

T = TypeVar("T")


@dataclass(slots=True)
class Report:
    """Growing result of a benchmark; each number is printed to stderr, and written to a file, when it is added."""

    what: str
    out: Path | None = None
    """File that has all numbers so far, if there is one."""
    ratios: dict[str, float] = field(default_factory=dict)
    """The numbers that the benchmark is for, by name."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """All other numbers: ``name``, ``value``, ``unit`` and ``settings``, all that the number depends on."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all rows that are added."""

    def add(self, name: str, value: float, unit: str, **settings: Any) -> None:
        settings |= self.common
        self.rows.append({"name": name, "value": float(f"{value:.5g}"), "unit": unit, "settings": settings})
        note(f"{name:40s} {value:14,.4g} {unit}")
        self.write()

    def ratio(self, name: str, value: float) -> None:
        self.ratios[name] = float(f"{value:.5g}")
        note(f"{name:40s} {value:14,.4g}")
        self.write()

    def measure(
        self, measures: Mapping[str, Callable[[], float]], rounds: int, unit: str, settings: Mapping[str, Any],
        name: str = "{}",
    ) -> dict[str, list[float]]:  # fmt: skip
        """Run measures in turns, add the median of each as a row ``name.format(measure)``; return all values."""
        results = in_turns(measures, rounds)
        for measure, values in results.items():
            self.add(name.format(measure), median(values), unit, **settings, rounds=rounds)
        return results

    def to_mapping(self) -> dict[str, Any]:
        """Return the contract's result: what, machine, ratios, rows."""
        return {"what": self.what, "machine": machine(), "ratios": self.ratios, "rows": self.rows}

    def write(self) -> None:
        """Write the result so far to ``out``."""
        if self.out is not None:
            write_json(self.out, self.to_mapping())

    def read(self, path: Path) -> None:
        """Take the numbers of an earlier result if there is a file. UserError if it is of something else."""
        if not path.exists():
            return
        found = read_json(path)
        if found.get("what") != self.what:
            raise UserError(f"out={path} exists, and is no result of bench {self.what}; give a new file")
        self.ratios, self.rows = found["ratios"], found["rows"]


def in_turns(measures: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Run each measure once per round, in alternating order; return its values after the ``warm_up`` rounds."""
    results: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(warm_up + rounds):
        for name in list(measures)[:: -1 if number % 2 else 1]:
            results[name].append(measures[name]())
    return {name: values[warm_up:] for name, values in results.items()}


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def timed(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def trained(runtime: Runtime, warmup: int, iterations: int) -> tuple[int, float, list[Metrics]]:
    """Train; return env steps, seconds and metrics of the ``iterations`` iterations after the warm-up."""
    metrics = []
    for iteration in runtime.iterations():
        if iteration.index == warmup:
            began_s, first_step = time.perf_counter(), iteration.env_steps
        elif iteration.index > warmup:
            metrics.append(iteration.metrics)
        if iteration.index == warmup + iterations:
            break
    return iteration.env_steps - first_step, time.perf_counter() - began_s, metrics


def run_module(module: str, *words: str, python: str = sys.executable) -> Any:
    """Run ``python -m module``; return the JSON value of its last line. CalledProcessError if it fails."""
    command = [python, "-m", module, *words]
    with interrupt_on_signals():  # ends the process, too
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def built(name: str, make: Callable[[], T]) -> T | None:
    """Return what ``make`` builds, or None and say why if it cannot be built here, whatever another library raises."""
    try:
        return make()
    except Exception as error:  # third-party code may raise anything
        note(f"{name} is left out: {type(error).__name__}: {one_line(error)}")
        return None


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
