"""Check that a ``VecEnv`` keeps its contract, whatever its simulator.

make(N) ──► Trial: records one rollout ──► CHECKS: each examines it, or runs envs of its own ──► Check results

check_env(make)             raises UserError with the first rule that is broken: for tests
run_checks(make, ...)       yields the result of every check: for ``python -m embodied.tasks check=<task>``
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf

from embodied.core.errors import UserError, describe_error, one_line
from embodied.envs.checks.rules import CHECKS, NOT_CONTRACT
from embodied.envs.checks.trial import Excused, Make, OutOfTime, Trial


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the check ``name``."""

    name: str
    passed: bool
    why: str = ""
    """The rule that is broken, or why there was nothing to check."""


def check_env(make: Make, num_envs: int = 4, seed: int = 0) -> None:
    """Raise UserError with the first rule that an environment breaks, by all checks but those of ``NOT_CONTRACT``."""
    with ExitStack() as opened:
        trial = Trial(make, opened, num_envs, seed)
        for name, check in CHECKS.items():
            if name not in NOT_CONTRACT:
                try:
                    check(trial)
                except Excused:
                    continue


def run_checks(
    make: Make,
    num_envs: int = 4,
    seed: int = 0,
    resets: int = 10_000,
    steps: int = 50,
    seconds: float = inf,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Yield the result of every check, also after failures. If the env cannot be run at all, no check is reached.

    resets: of the check of leaks. steps: largest time limit of an episode, so that slow simulators reach the ends of
    episodes. seconds: time limit of all checks. note: receives a sentence for the user. An exception of the environment
    fails the check.
    """
    with ExitStack() as opened:
        trial = Trial(make, opened, num_envs, seed, steps, resets, seconds, note)
        last = ""
        for name, check in CHECKS.items():
            if trial.broken:
                yield Result(name, False, f"not reached: see {last}")
                continue
            last = name
            try:
                check(trial)
            except Excused as reason:
                yield Result(name, True, str(reason))
            except (UserError, OutOfTime) as error:
                yield Result(name, False, one_line(error))
            except (Exception, SystemExit) as error:  # third-party code may raise anything
                yield Result(name, False, f"raised {describe_error(error)}")
            else:
                yield Result(name, True)
