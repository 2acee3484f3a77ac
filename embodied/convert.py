"""Convert episodes to a data set: ``python -m embodied.convert source=trajectory.h5 out=demos/x [key=value ...]``

  source=...                ManiSkill's .h5 file, in a folder with its .json; or the folder episodes in a report of
                            embodied.deploy; or a LeRobotDataset of joint positions, as teleoperation records it
  instruction="..."         instruction of all episodes; by default that of the data set, or ManiSkill's environment id
  bundle=<bundle dir>       for episodes of a deployment: the bundle whose policy was deployed
  keep_failures=false       also keep episodes that do not end solved

For a LeRobotDataset, whose episodes become those of a task of ours:

  task=...  task.<option>=...   the task; task.control.mode=joint_delta keeps the joints as they were recorded
  cameras=[]                images to keep, such as [front,wrist]; without any, the data set must have the places of the
                            objects that the task's state has
  image_size=64             width and height to which the middle of each image is scaled, pixels
  unit=...                  of the joints: deg (recorded with use_degrees=true), percent (with false: -100 to 100 over
                            their range) or rad
  mapping=mapping.json      names, units, signs and offsets of the joints, names of cameras; in place of unit
  propose_mapping=false     write the mapping that unit means to the new file mapping=, to be changed

out is a new LeRobotDataset v3, as embodied.collect writes it.
Last line of stdout: {"data", "task", "episodes", "frames", "dropped"}.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embodied.core.config import PRESETS, parse_overrides
from embodied.core.errors import UserError, missing_key
from embodied.core.options import PositiveInt, config_dataclass
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.core.user_files import refuse_places
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.report import load_episodes
from embodied.deployment.robots.mapping import RobotMapping, read_mapping, write_mapping
from embodied.session.command import run_command, split_words
from embodied.session.config import compose_run, words_of_environment
from embodied.session.files import check_new_dir

if TYPE_CHECKING:
    from embodied.data import Episode


@config_dataclass
class ConvertConfig:
    source: str
    out: str
    instruction: str | None = None
    bundle: str | None = None
    keep_failures: bool = False
    cameras: tuple[str, ...] = ()
    image_size: PositiveInt = 64
    unit: Literal["deg", "rad", "percent"] | None = None
    mapping: str | None = None
    propose_mapping: bool = False


def convert(argv: Sequence[str]) -> dict[str, Any]:
    """Read and write; return the command's result. UserError for bad input, with nothing written."""
    words = parse_overrides(argv)
    options, of_task = split_words(words, ConvertConfig, ("task", "sim", PRESETS))
    source, out = Path(options.source), Path(options.out)
    check_new_dir(out)
    from embodied.data import write  # these import torch
    from embodied.data.maniskill import read_trajectories
    from embodied.session.deployed.robot_dataset import episodes_of

    recorded: dict[str, Any] | None = None
    mapping: RobotMapping | None = None
    if (source / "meta" / "info.json").is_file():
        episodes, spec, recorded, mapping = _of_joints(options, of_task)
    elif of_joints := [
        key for key in words if key in (*of_task, "cameras", "image_size", "unit", "mapping", "propose_mapping")
    ]:
        if not source.exists():
            raise UserError(f"source={source} does not exist")
        raise UserError(f"{of_joints[0]}: only for a LeRobotDataset, and source={source} has no meta/info.json")
    elif not source.is_dir() and source.suffix != ".npz":
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
    write(out, kept, spec, recorded)
    if mapping is not None and options.propose_mapping:
        write_mapping(Path(str(options.mapping)), mapping)
    return {
        "data": str(out), "task": spec.task, "episodes": len(kept), "frames": sum(map(len, kept)),
        "dropped": len(episodes) - len(kept),
    }  # fmt: skip


def _of_joints(
    options: ConvertConfig, of_task: dict[str, Any]
) -> "tuple[list[Episode], EnvSpec, dict[str, Any], RobotMapping]":
    """Return the episodes of a LeRobotDataset, the task's spec, words that build its environment, and the mapping."""
    from embodied.session.deployed.joint_dataset import joint_episodes
    from embodied.session.factories import make_spec

    if "task" not in of_task:
        raise missing_key("task")
    if options.bundle is not None:
        raise UserError("bundle: only for the episodes of a deployment, and source is a LeRobotDataset")
    if options.propose_mapping and (None in (options.unit, options.mapping) or Path(str(options.mapping)).exists()):
        raise UserError("propose_mapping=true needs unit=, and mapping=<a new file>")
    if not options.propose_mapping and (options.unit is None) == (options.mapping is None):
        got = "both unit and mapping" if options.unit else "neither unit nor mapping"
        needed = "unit=deg, rad or percent, or mapping=<file>: LeRobot does not record the unit of joints"
        raise UserError(f"got {got}, needed: {needed}")
    if len(set(options.cameras)) < len(options.cameras):
        raise UserError(f"cameras: got {list(options.cameras)}, allowed: each once")
    refuse_places()
    config = compose_run(of_task)
    spec = make_spec(config, [CameraSpec.square(name, options.image_size) for name in options.cameras])
    mapping = options.unit or read_mapping(Path(str(options.mapping)))
    episodes, found, lines = joint_episodes(Path(options.source), spec, mapping, options.instruction)
    print(*lines, sep="\n")
    return episodes, spec, words_of_environment(of_task, config), found


main = partial(run_command, convert, __doc__, first="source")

if __name__ == "__main__":
    sys.exit(main())
