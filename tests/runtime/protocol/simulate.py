"""Run the protocol under schedules of faults: ``python -m tests.runtime.protocol.simulate [seeds=N] [first=N]``

  seeds=1000000      number of schedules
  first=0            seed of the first; a seed is a schedule
  trace=true         show every step, of the first schedule alone

A schedule that breaks a rule is shown with its seed, and running that seed again does the same. Last line of stdout:
{"schedules", "steps", "sessions", "failed": [seeds], "cpu_s"}. Exit code 0 if none failed, 1 if one did, 2 for bad
input.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from dataclasses import dataclass

from tests.runtime.protocol.checks import Checks
from tests.runtime.protocol.parts import Components, Ended, Violation
from tests.runtime.protocol.session import Session
from tests.runtime.protocol.world import FOREVER_S, Plan, World

SOUND = Components()
SHOWN = 10
"""Failing schedules after which no more are run."""
BOUNDS = {"seeds": 1_000_000, "first": 0}


class Failed(Exception):
    """A schedule broke a rule. Its message tells which, and how to see it again."""

    def __init__(self, seed: int, plan: Plan, error: BaseException, trace: list[str] | None) -> None:
        self.seed = seed
        what = f"{type(error).__name__}: {error}"
        again = f"python -m tests.runtime.protocol.simulate seeds=1 first={seed} trace=true"
        super().__init__("\n".join([*(trace or ()), f"seed {seed} ({plan}): {what}", f"see it again: {again}"]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a schedule came to."""

    steps: int
    sessions: int
    now_s: float


def run(seed: int, components: Components = SOUND, trace: list[str] | None = None) -> Outcome:
    """Run the schedule of a seed to its last batch. Failed if a rule is broken."""
    rng = random.Random(seed)
    plan = Plan(seed, rng)
    try:
        return _run(plan, World(rng, plan, trace), components)
    except (Violation, AssertionError, KeyError) as error:
        raise Failed(seed, plan, error, trace) from error


def _run(plan: Plan, world: World, components: Components) -> Outcome:
    checks = Checks(plan)
    session = Session(world, plan, components, checks, None)
    faults = list(reversed(plan.faults))
    checkpoint = None
    steps = sessions = 0
    while session.ledger.version < plan.batches:
        try:
            steps += session.run(faults[-1].time_s if faults else FOREVER_S)
            if faults:
                fault = faults.pop()
                world.now_s = max(world.now_s, fault.time_s)
                checks.ends(world.now_s)
                session.suffer(fault)
        except Ended as reason:
            world.note("ENDED", reason)
            world.forget_messages()
            world.now_s += 1.0
            checks.ends(world.now_s)
            sessions += 1
            checkpoint = session.saved or checkpoint
            session = Session(world, plan, components, checks, checkpoint)
    return Outcome(steps, sessions + 1, world.now_s)


def main(arguments: list[str]) -> int:
    options = dict(BOUNDS)
    trace: list[str] | None = None
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "trace" and value in ("true", "false"):
            trace = [] if value == "true" else None
        elif key in BOUNDS and value.isdecimal():
            options[key] = int(value)
        else:
            print(f"{argument}: allowed are seeds=N, first=N, trace=true or trace=false", file=sys.stderr)
            return 2
    steps = sessions = 0
    failed: list[int] = []
    gc.freeze()  # what was imported is never garbage
    began = time.process_time()
    seeds = range(options["first"], options["first"] + (1 if trace is not None else options["seeds"]))
    for done, seed in enumerate(seeds, 1):
        try:
            outcome = run(seed, trace=trace)
            steps, sessions = steps + outcome.steps, sessions + outcome.sessions
        except Failed as error:
            failed.append(seed)
            print(error, file=sys.stderr)
            if len(failed) == SHOWN:
                break
        if done % 10_000 == 0:
            print(f"{done:,} schedules, {len(failed)} failed, {time.process_time() - began:.0f} s", file=sys.stderr)
    if trace and not failed:
        print(*trace, sep="\n", file=sys.stderr)
    result: dict[str, object] = {"schedules": done, "steps": steps, "sessions": sessions, "failed": failed}
    print(json.dumps(result | {"cpu_s": round(time.process_time() - began, 1)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
