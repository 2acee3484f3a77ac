"""Export a policy for a robot: ``python -m embodied.export run=<run dir> out=<bundle dir> [key=value ...]``

  checkpoint=last|step_<n>    checkpoint to export
  episodes=16                 simulated episodes in which observations are recorded
  device=auto                 device of the policy meanwhile: cpu, cuda or cuda:<index>; auto is CUDA if there is one
  layout=auto                 onnx, or transformers (safetensors), for a policy around one of its models, such as vla;
                              auto is onnx unless the weights take more than 1 GB

The bundle has policy.onnx (normaliser inside, physical units) or the files of transformers, bundle.json (order, units,
rate, limits, hashes), parity.npz, simulation.json (the arm that robot=sim simulates) and a README.md. The export fails,
and leaves nothing, if the outputs of the policy and of the bundle's runner on the recorded observations differ by more
than 1e-5 of the action's scale.

Last line of stdout: {"bundle", "parity_max", "policy", "task", "layout", "bytes", "sha256"}; sha256 is of bundle.json.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from embodied.core.options import DeviceName, PositiveInt, config_dataclass
from embodied.core.user_files import sha256
from embodied.deployment.bundle.format import BUNDLE_FILE
from embodied.session.command import command
from embodied.session.config import read_acting
from embodied.session.files import check_new_dir


@config_dataclass
class ExportConfig:
    run: str
    out: str
    checkpoint: str = "last"
    episodes: PositiveInt = 16
    device: DeviceName = "auto"
    layout: Literal["auto", "onnx", "transformers"] = "auto"


@command(first="run")
def main(options: ExportConfig) -> dict[str, Any]:
    """Write a bundle; return the command's result. UserError for bad input, with nothing written."""
    run_dir, out = Path(options.run), Path(options.out)
    config = read_acting(run_dir, options.device)
    check_new_dir(out)
    from embodied.deployment.bundle.write import check_exportable, chosen_layout  # these import torch
    from embodied.session.deployed.exporting import bundle_source, export_bundle, origin_of
    from embodied.session.factories import load_checkpoint, load_policy, make_spec

    found = load_checkpoint(run_dir, options.checkpoint)
    spec = make_spec(config)
    check_exportable(spec, config.robot)
    policy = load_policy(config, found)
    print(f"recording observations of {options.episodes} episodes of {spec.task}", file=sys.stderr)
    source = bundle_source(config, policy, origin_of(config, run_dir, found), options.episodes)
    layout = chosen_layout(policy, options.layout)
    print(f"exporting, layout {layout}: half a minute for a policy on the state, minutes for a VLA", file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        bundle = export_bundle(part, source, layout)
        part.chmod(0o755)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return {
        "bundle": str(out), "parity_max": bundle.parity_max, "policy": bundle.origin.policy, "task": bundle.origin.task,
        "layout": bundle.layout, "bytes": sum(file.stat().st_size for file in out.iterdir()),
        "sha256": sha256(out / BUNDLE_FILE),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
