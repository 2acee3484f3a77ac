"""The protocol of the runtimes under seeded schedules of faults, and that broken parts are found by them."""

from __future__ import annotations

import json

import pytest

from tests.runtime.protocol.mutants import MUTANTS, SOUND
from tests.runtime.protocol.parts import Components
from tests.runtime.protocol.simulate import Failed, main, run

SCHEDULES = 6_000
ENOUGH = 4_000
"""Schedules that find any of the broken parts."""
RARE = {"CuresForEver": 3358, "TakesTicketsOfALostLearner": 991}
"""Where the search begins for mistakes that only one schedule in a thousand or more shows: one that does."""


@pytest.mark.slow(reason=f"{SCHEDULES} schedules")
def test_no_schedule_of_faults_breaks_the_protocol() -> None:
    sessions = steps = 0
    for seed in range(SCHEDULES):
        outcome = run(seed)
        sessions, steps = sessions + outcome.sessions, steps + outcome.steps
    assert sessions > 1.5 * SCHEDULES, "sessions that ended were resumed"
    assert steps > 50 * SCHEDULES


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_part_is_found(name: str) -> None:
    begin = RARE.get(name, 0)
    first = next(filter(None, (failure(seed, MUTANTS[name]) for seed in range(begin, begin + ENOUGH))))
    assert f"first={first.seed} " in str(first), "the message says how to see it again"
    assert str(failure(first.seed, MUTANTS[name])) == str(first), "a seed is a schedule"
    assert failure(first.seed, SOUND) is None


def failure(seed: int, components: Components) -> Failed | None:
    """Return what broke a rule in a schedule, or None."""
    try:
        run(seed, components)
    except Failed as error:
        return error
    return None


def test_a_seed_is_a_schedule() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run(8, trace=trace)
    assert len(traces[0]) > 50
    assert [line.partition("<")[0] for line in traces[0]] == [line.partition("<")[0] for line in traces[1]]
    assert any("FAULT" in line for line in traces[0])


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seeds=20", "first=100"]) == 0
    assert json.loads(capsys.readouterr().out)["schedules"] == 20
    assert main(["seeds=many"]) == 2
    assert "seeds=many: allowed are" in capsys.readouterr().err
