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
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from embodied.core.config import nest, parse_overrides
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import Text, config_dataclass, from_mapping
from embodied.report.metrics import write_json
from embodied.session.command import run_command

BENCHMARKS = {
    "async": "embodied.benchmarks.asynchrony:measure",
    "deploy": "embodied.benchmarks.deploy:measure",
    "ray": "embodied.benchmarks.train:measure_ray",
    "train": "embodied.benchmarks.train:measure",
}
"""Functions ``measure(short)`` that return a ``Report``. Their modules import torch."""
WITH_OPTIONS = {
    "gpu": ("embodied.benchmarks.gpu:measure", "embodied.benchmarks.gpu:GpuOptions"),
    "sim": ("embodied.benchmarks.sim:measure", "embodied.benchmarks.config:SimOptions"),
    "suite": ("embodied.benchmarks.suite:measure_suite", "embodied.benchmarks.suite:SuiteOptions"),
}
"""Functions ``measure(options, short, out)``, which may write what they have to ``out``, and their options."""
LISTS = ("ours", "peers", "parts", "tasks")


@config_dataclass
class BenchOptions:
    """Options after the name of a benchmark; see the top of this file."""

    out: Text | None = None
    short: bool = False


def bench(argv: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark. UserError for an unknown one, a bad option or an ``out`` that cannot be written."""
    if not argv or "=" in argv[0]:
        raise UserError(f"say what to measure: python -m embodied.bench {'|'.join(sorted(BENCHMARKS | WITH_OPTIONS))}")
    if argv[0] not in BENCHMARKS | WITH_OPTIONS:
        raise unknown_name("benchmark", argv[0], BENCHMARKS | WITH_OPTIONS)
    values = parse_overrides([_as_list(word) for word in argv[1:]])
    own: dict[str, Any] = {key: values.pop(key) for key in ("out", "short") if key in values}
    peers = argv[0] == "train" and bool(values)
    options = from_mapping(BenchOptions, own if peers or argv[0] in WITH_OPTIONS else own | values)
    out = None if options.out is None else Path(options.out)
    kept = argv[0] == "suite" and out is not None and out.is_file()  # its rows are read
    if out is not None and not kept and (out.exists() or not out.parent.is_dir()):  # before minutes of measuring
        raise UserError(f"out={out} exists, or its directory {out.parent} does not; give a new file")
    if peers:
        from embodied.benchmarks.peers.compare import CompareOptions, compare

        report = compare(from_mapping(CompareOptions, nest(values)), options.short)
    elif argv[0] in WITH_OPTIONS:
        measure, options_class = WITH_OPTIONS[argv[0]][0], resolve_name(WITH_OPTIONS[argv[0]][1])
        for key in values.keys() - (known := options_class.__dataclass_fields__.keys()):
            raise unknown_name("option", key, [*known, *BenchOptions.__dataclass_fields__])
        report = resolve_name(measure)(from_mapping(options_class, values), options.short, out)
    else:
        report = resolve_name(BENCHMARKS[argv[0]])(options.short)
    result = report.to_mapping()
    if out is not None:
        write_json(out, result)
    return result


def _as_list(word: str) -> str:
    """Return ``peers=[a,b]`` for ``peers=a,b``, the same for other lists of names, and any other word unchanged."""
    key, _, value = word.partition("=")
    return f"{key}=[{value}]" if key in LISTS and not value.startswith("[") else word


main = partial(run_command, bench, __doc__)

if __name__ == "__main__":
    sys.exit(main())
