"""Copy the policy of a finished run, and what reads it, into a folder that others can begin from (init=).

python docs/results/policy_alone.py <run> <new folder>

Weights are rounded to half precision, which halves the file. Statistics and scales, which are small, are kept as they
are. Optimiser, evaluations and older checkpoints stay behind.
"""

import shutil
import sys
from pathlib import Path

import torch

from embodied.runtime import checkpoint

FILES = ("config.yaml", "interface.json")
LARGE = 1024  # numbers of a tensor that is rounded


def main(run: Path, folder: Path) -> None:
    found = checkpoint.load_last(run, only="policy")
    weights = checkpoint.read_weights(found.state, str(run))
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(run / name, folder / name)
    rounded = {
        name: value.half() if value.dtype == torch.float32 and value.numel() >= LARGE else value
        for name, value in weights.items()
    }
    checkpoint.save(folder, found.env_steps, {"policy": rounded})
    (folder / "checkpoints" / "last").unlink()  # archives of packages have no links; the only checkpoint is the newest


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
