"""Convert episodes to a data set: ``python -m embodied.convert source=trajectory.h5 out=demos/x [key=value ...]``

  instruction="..."         instruction of the episodes of ManiSkill; by default the environment's id
  bundle=<bundle dir>       for episodes of a deployment: the bundle whose policy was deployed
  keep_failures=false       also keep episodes that do not end solved

source is ManiSkill's .h5 file, in a folder with its .json, or the folder episodes in a report of embodied.deploy. out
is a new LeRobotDataset v3, as embodied.collect writes it.
Last line of stdout: {"data", "task", "episodes", "frames", "dropped"}.
"""

import sys
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError
from embodied.core.options import config_dataclass
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.report import load_episodes
from embodied.session.command import command
from embodied.session.files import check_new_dir


@config_dataclass
class ConvertConfig:
    source: str
    out: str
    instruction: str | None = None
    bundle: str | None = None
    keep_failures: bool = False


@command(first="source")
def main(options: ConvertConfig) -> dict[str, Any]:
    """Read and write; return the command's result. UserError for bad input, with nothing written."""
    source, out = Path(options.source), Path(options.out)
    check_new_dir(out)
    from embodied.data import write  # these import torch
    from embodied.data.maniskill import read_trajectories
    from embodied.session.deployed.robot_dataset import episodes_of

    if not source.is_dir() and source.suffix != ".npz":
        episodes, spec = read_trajectories(source, options.instruction)
    elif options.bundle is None:
        raise UserError(f"source={source} needs bundle=<bundle dir>, which says what its numbers mean")
    else:
        bundle = read_bundle(Path(options.bundle), with_policy=False)
        episodes, spec = episodes_of(load_episodes(source, bundle), bundle), bundle.env_spec
    kept = [episode for episode in episodes if options.keep_failures or bool(episode.success_L[-1])]
    if not kept:
        none = f"none of its {len(episodes)} episodes ends solved, or says so"
        raise UserError(f"source={source}: {none}; keep_failures=true keeps all")
    write(out, kept, spec)
    return {
        "data": str(out), "task": spec.task, "episodes": len(kept), "frames": sum(map(len, kept)),
        "dropped": len(episodes) - len(kept),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
