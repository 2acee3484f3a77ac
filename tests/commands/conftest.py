"""A finished run that tests of commands look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.helpers import SMALL, Outcome, run_train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A finished run of 640 steps, and what its command printed. Read-only: copy it to change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "reach"
    outcome = run_train(*SMALL, "total_steps=640", f"out={run_dir}")
    assert outcome.code == 0, outcome.stderr
    return run_dir, outcome
