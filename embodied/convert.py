"""Convert ManiSkill trajectories: ``python -m embodied.convert source=trajectory.h5 out=demos/x [key=value ...]``

  instruction="..."         instruction of the episodes; by default the environment's id
  keep_failures=false       also keep episodes that do not end solved

source is the .h5 file, in a folder with its .json; out is a new LeRobotDataset v3, as embodied.collect writes it.
Last line of stdout: {"data", "task", "episodes", "frames", "dropped"}.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.core.config import nest, parse_overrides
from embodied.core.errors import UserError
from embodied.core.options import config_dataclass, from_mapping
from embodied.data import write
from embodied.data.maniskill import read_trajectories
from embodied.run.command import run_command
from embodied.run.directory import check_new_dir


@config_dataclass
class ConvertConfig:
    """Options of the command; see the top of this file."""

    source: str
    out: str
    instruction: str | None = None
    keep_failures: bool = False


def convert(argv: Sequence[str]) -> dict[str, Any]:
    """Read and write; return the command's result. UserError for bad input, with nothing written."""
    options = from_mapping(ConvertConfig, nest(parse_overrides(argv)))
    out = Path(options.out)
    check_new_dir(out)
    episodes, spec = read_trajectories(Path(options.source), options.instruction)
    kept = [episode for episode in episodes if options.keep_failures or bool(episode.success_L[-1])]
    if not kept:
        raise UserError(
            f"source={options.source}: none of its {len(episodes)} episodes ends solved; keep_failures=true"
        )
    write(out, kept, spec)
    return {
        "data": str(out),
        "task": spec.task,
        "episodes": len(kept),
        "frames": sum(map(len, kept)),
        "dropped": len(episodes) - len(kept),
    }


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(convert, __doc__, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
