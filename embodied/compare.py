"""Compare policies in the same episodes: ``python -m embodied.compare policies=[a,b] [key=value ...]``

  policies=[a,b,...]          directories of runs, of checkpoints (runs/x/checkpoints/step_1000) or of bundles, or
                              ws://host:port of a policy server; the first is the reference, the others are candidates
  task=                       environments, with their defaults; by default those of the first policy's training
  mapping=<file>              names and units of a server of openpi's protocol that is not of this project
  min_difference=0.05         a candidate is worse if its success is lower by more than this, as a fraction
  limit=6000                  episodes of each policy after which it stays undecided
  seed=0                      initial states; those of embodied.eval with this seed
  randomization=none  sim=    as for embodied.eval; by default those of the environments
  noise=  delay_ms=           as for embodied.eval; by default as in each policy's training
  out=<file>                  JSON file of the result; by default runs/comparisons/<task>-<time>.json
  device=auto  num_threads=0  as for embodied.eval

Exit code 0: shown that no candidate is worse by more than min_difference. 1: shown that one is. 3: undecided at the
limit. Either error has a probability of at most 5%, no matter when the test stops; with several candidates, all of
them together have. Last line of stdout: {"policies", "episodes", "success_at_end", "difference", "difference_ci95",
"min_difference", "decision", "better", "checkpoints", ...}, or with several candidates "comparisons", a list of such
results. "better" is the better policy of the two, if that is shown; "checkpoints" has checkpoint and SHA-256 of each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from embodied.core.comparison import NOT_WORSE, POWER, UNDECIDED, WORSE, comparison, decide
from embodied.core.errors import UserError
from embodied.core.options import (
    DeviceName,
    FractionBelow1,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Text,
    config_dataclass,
)
from embodied.report.metrics import write_json
from embodied.report.progress import Line
from embodied.runtime.config import EvalNoise
from embodied.session.command import Failed, command
from embodied.session.config import RunConfig, compose_run, with_environments

if TYPE_CHECKING:
    from embodied.session.deployed.entrants import Entrant

BATCH = 20  # episodes between two looks at the evidence
ALPHA = 0.05
CODES = {NOT_WORSE: 0, UNDECIDED: 3, WORSE: 1}  # the last that a candidate has is that of the command


@config_dataclass
class CompareConfig:
    policies: Annotated[tuple[Text, ...], Field(min_length=2)]
    task: Text | None = None
    mapping: Text | None = None
    min_difference: FractionBelow1 = 0.05
    limit: PositiveInt = 6000
    seed: Seed = 0
    randomization: Text | None = None
    sim: Text | None = None
    noise: EvalNoise | None = None
    delay_ms: NonNegative | None = None
    out: Text | None = None
    device: DeviceName = "auto"
    num_threads: NonNegativeInt = 0


@command()
def main(options: CompareConfig) -> dict[str, Any]:
    """Compare policies; return the contract's result. UserError for bad input, Failed for a worse or undecided one."""
    if options.out is not None and Path(options.out).exists():
        raise UserError(f"out={options.out} exists; give a new file")
    with ExitStack() as opened:
        try:
            config, entrants = enter(options, opened)
            alpha = ALPHA / (len(entrants) - 1)  # of each candidate
            reference, *candidates = play(options, config, entrants, alpha)
        except ConnectionError as error:
            raise UserError(f"policies: {error}") from error
    task = config.task.title
    path = Path(options.out or f"runs/comparisons/{task.replace('/', '.')}-{datetime.now():%Y%m%d-%H%M%S-%f}.json")
    rows = []
    for name, solved in zip(options.policies[1:], candidates, strict=True):
        found = comparison(reference[: len(solved)], solved, options.min_difference, alpha)
        found["better"] = {"a": options.policies[0], "b": name}.get(found["better"])
        rows.append({"policies": [options.policies[0], name], **found})
        print(sentence(rows[-1]), file=sys.stderr)
    decision = max((row["decision"] for row in rows), key=list(CODES).index)
    result: dict[str, Any] = {"task": task, "seed": options.seed, "file": str(path)}
    result["checkpoints"] = [{"policy": entrant.name, **entrant.origin} for entrant in entrants]
    if len(rows) == 1:
        result |= rows[0]
    else:
        result |= {"policies": list(options.policies), "decision": decision, "comparisons": rows}
    write_json(path, result)
    if CODES[decision]:
        names = " and ".join(row["policies"][1] for row in rows if row["decision"] == decision)
        raise Failed(f"the gate does not pass: {names} is {decision}", result, CODES[decision])
    return result


def enter(options: CompareConfig, opened: ExitStack) -> tuple[RunConfig, list[Entrant]]:
    """Load all policies and check that they fit; return the configuration of the environments, and the policies."""
    from embodied.session.deployed.entrants import check_alike, read_entrant  # imports torch

    overrides = {"task": options.task, "device": options.device}
    config = None if options.task is None else compose_run(overrides)
    where, entrants = f"task={options.task}", []
    for name in options.policies:
        entrant = read_entrant(name, options.noise, options.device, config, options.mapping, opened)
        entrants.append(entrant)
        if config is None:
            config, where = entrant.config, name
    assert config is not None
    check_alike(entrants, config, where)
    for entrant in entrants:
        if (entrant.config.task, entrant.config.sim) != (config.task, config.sim):
            print(f"{entrant.name} had other options of task or simulator in its training", file=sys.stderr)
    return with_environments(config, options.sim, options.randomization), entrants


def play(
    options: CompareConfig, config: RunConfig, entrants: Sequence[Entrant], alpha: float
) -> list[NDArray[np.int64]]:
    """Play batches of episodes until every candidate is decided; return which episodes each policy solved, 0 or 1.

    alpha: probability of an error about a candidate.
    """
    from embodied.runtime import threads
    from embodied.session.factories import evaluation_plans, make_spec

    threads.use(options.num_threads or threads.torch_cores())
    num_envs, num_threads = min(BATCH, options.limit), options.num_threads or threads.available_cores()
    plans = evaluation_plans(make_spec(config), num_envs * math.ceil(options.limit / num_envs), options.seed)
    with ExitStack() as opened:
        for entrant in entrants:
            opened.enter_context(closing(entrant.enter(config, num_envs, num_threads, options.delay_ms)))
        line = opened.enter_context(closing(Line()))
        solved = [np.zeros(0, np.int64) for _ in entrants]
        open_ids = list(range(1, len(entrants)))
        while open_ids and len(solved[0]) < len(plans):
            batch = plans.rows(slice(len(solved[0]), len(solved[0]) + num_envs))
            for i in (0, *open_ids):
                solved[i] = np.concatenate([solved[i], entrants[i].play(batch)])
            pairs = zip(entrants, solved, strict=True)
            rates = ", ".join(
                f"{('baseline', 'candidate')[i > 0]} {one.name} {rows.mean():.1%}"
                for i, (one, rows) in enumerate(pairs)
            )
            line.show(f"{len(solved[0])} of at most {len(plans)} episodes: {rates}")
            delta = options.min_difference
            open_ids = [i for i in open_ids if decide(solved[i] - solved[0], delta, alpha) == UNDECIDED]
    return solved


def sentence(row: Mapping[str, Any]) -> str:
    """Return the result of one candidate in words."""
    (a, b), (p, q), (low, high) = row["policies"], row["success_at_end"], row["difference_ci95"]
    points = f"difference {100 * row['difference']:+.1f} points, {100 * low:+.1f} to {100 * high:+.1f}"
    lines = [f"baseline {a} {p:.1%}, candidate {b} {q:.1%} of the same {row['episodes']} episodes: {points}"]
    limit = f"worse by more than {100 * row['min_difference']:g} points"
    lines.append({NOT_WORSE: f"{b} is not {limit}", WORSE: f"{b} is {limit}"}.get(row["decision"], f"{b} is undecided"))
    if row["better"] is not None:
        lines[-1] += f"; {row['better']} is better"
    if row["saved_episodes"] is not None:
        fixed = f"a fixed number of episodes with {POWER:.0%} power at these rates is {row['fixed_episodes']}"
        saved, why = row["saved_episodes"], "choosing a fixed number needs these rates beforehand, this test does not"
        lines.append(
            f"{fixed}; " + (f"stopping early saved {saved}" if saved >= 0 else f"this took {-saved} more: {why}")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
