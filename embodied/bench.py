"""Measure speed and memory: ``python -m embodied.bench <what> [key=value ...]``

  sim          pool of environments, compared with the bare engine and with other libraries; memory; parts= chooses
               from engine,flatness,envpool,warp,adapters,memory; ``make peers`` adds mjbatch and mjbatch-uni
  train        training throughput, compared with the bound that the costs of its parts set; local compared with sync
  train task=<task> peers=sb3,rsl_rl,torchrl,unilab
               training throughput compared with PPO of other libraries on the same task, with the same settings;
               level=<success or return>, total_steps= also time them to a level; rounds=, ppo.num_envs=, ...
  async        asynchronous training, compared with synchronous training and with the bound: simulators with
               heavy-tailed latency, slow inference, robots
  gpu          one GPU: what pool, training and π0 take of what the card can do, in 8 minutes; parts= chooses from
               floors,pool,solve,train,lora,threads,pi0,cameras
  ray          training on Ray compared with threads on one machine
  suite        training on other people's tasks with task= alone, for hours; what out=<file> has already is not run
               again; tasks=, seeds=, max_steps=, peer=sb3 for stable-baselines3's PPO with its defaults
  deploy       latency of bundles, missed deadlines of a closed loop, requests per second of the server
  out=<file>   also write the result to this file, which must not exist yet
  short=true   use tiny sizes to see that it works; the numbers mean nothing

Nothing else should run on the machine meanwhile. Measures that are compared take turns in one process, and every ratio
is a median over rounds. Last line of stdout: {"what", "machine", "ratios", "rows"}.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from embodied.core.config import nest, parse_overrides
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import Text, config_dataclass, from_mapping
from embodied.session.command import run_command

BENCHMARKS = {
    "async": ("asynchrony:measure", None),
    "deploy": ("deploy:measure", None),
    "gpu": ("gpu:measure", "gpu:GpuOptions"),
    "ray": ("train:measure_ray", None),
    "sim": ("sim:measure", "config:SimOptions"),
    "suite": ("suite:measure", "suite:SuiteOptions"),
    "train": ("train:measure", None),
}
"""Functions ``measure(report, short, options)`` in embodied.benchmarks, and their options, if they take any."""
PEERS = ("peers.compare:compare", "peers.compare:CompareOptions")  # of ``train`` with options
LISTS = ("ours", "peers", "parts", "tasks")


@config_dataclass
class BenchOptions:
    """Options after the name of a benchmark; see the top of this file."""

    out: Text | None = None
    short: bool = False


def bench(argv: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark. UserError for an unknown one, a bad option or an ``out`` that cannot be written."""
    if not argv or "=" in argv[0]:
        raise UserError(f"say what to measure: python -m embodied.bench {'|'.join(BENCHMARKS)}")
    if argv[0] not in BENCHMARKS:
        raise unknown_name("benchmark", argv[0], BENCHMARKS)
    values = nest(parse_overrides([_as_list(word) for word in argv[1:]]))
    shared = [field.name for field in fields(BenchOptions)]
    options = from_mapping(BenchOptions, {key: values.pop(key) for key in shared if key in values})
    out = None if options.out is None else Path(options.out)
    kept = argv[0] == "suite" and out is not None and out.is_file()  # its rows are read
    if out is not None and not kept and (out.exists() or not out.parent.is_dir()):  # before minutes of measuring
        raise UserError(f"out={out} exists, or its directory {out.parent} does not; give a new file")
    measure, own = PEERS if argv[0] == "train" and values else BENCHMARKS[argv[0]]
    options_class = None if own is None else resolve_name(f"embodied.benchmarks.{own}")
    known = [] if options_class is None else [field.name for field in fields(options_class)]
    for key in values.keys() - {*known}:
        raise unknown_name("option", key, known + shared)
    from embodied.benchmarks.measure import Report  # imports torch

    report, given = Report(argv[0], out), [] if options_class is None else [from_mapping(options_class, values)]
    resolve_name(f"embodied.benchmarks.{measure}")(report, options.short, *given)
    report.write()
    return report.to_mapping()


def _as_list(word: str) -> str:
    """Return ``peers=[a,b]`` for ``peers=a,b``, the same for other lists of names, and any other word unchanged."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key in LISTS and not value.startswith("[") else word


main = partial(run_command, bench, __doc__)

if __name__ == "__main__":
    sys.exit(main())
