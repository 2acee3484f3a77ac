"""Names of a run's checkpoints: ``checkpoints/step_<env_steps>``. Imports no torch."""

import re
from pathlib import Path

from embodied.core.errors import UserError


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints ``step_<env_steps>`` in a folder of them, the newest first."""
    steps = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(steps, key=steps_of, reverse=True)


def newest(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run. UserError if it has none."""
    for path in newest_first(run_dir / "checkpoints"):
        return path
    raise UserError(f"{run_dir} has no checkpoint yet")


def steps_of(path: Path) -> int:
    """Return the steps of a checkpoint by its name."""
    return int(path.name.removeprefix("step_"))
