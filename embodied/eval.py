"""Judge a trained policy: ``python -m embodied.eval run=<run dir> [key=value ...]``

  episodes=200  seed=0        full-length episodes; the initial states depend on the seed alone
  checkpoint=last|step_<n>    which weights
  video=true                  also videos/<checkpoint>_seed<seed>.mp4 in the run directory, with what the robot is told
  num_threads=0               of the simulation; 0 is all cores

The policy acts deterministically. Last line of stdout, also written to the run's eval/: {"task", "episodes",
"success_once", "success_at_end", "success_at_end_ci95", "return_mean", "episode_length_mean", "seed", ...}. Where some
instructions are held out from training, "splits" has the success on those and on the others, and of each goal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodied.command import run_command
from embodied.core.config import at_least, from_mapping, nest, parse_overrides
from embodied.core.errors import UserError, unknown_name
from embodied.core.protocols import Policy
from embodied.core.seeds import Purpose, first_env_seed
from embodied.experiment import RunConfig, make_env, make_policy, read_run
from embodied.report.metrics import write_json
from embodied.runtime import checkpoint, evaluate, threads

VIDEO_ENVS = 4  # beside each other
VIDEO_SIZE = (320, 240)  # width and height of each, pixels


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Options of the command; see the top of this file."""

    run: str
    episodes: int = 200
    seed: int = 0
    checkpoint: str = "last"
    video: bool = False
    num_threads: int = 0

    def __post_init__(self) -> None:
        at_least("episodes", self.episodes, 1)
        at_least("seed", self.seed, 0)
        at_least("num_threads", self.num_threads, 0)


def evaluate_run(argv: Sequence[str]) -> dict[str, Any]:
    """Evaluate a checkpoint of a run; returns the contract's result. UserError for bad input."""
    options = from_mapping(EvalConfig, nest(parse_overrides(argv)))
    run_dir = Path(options.run)
    config = read_run(run_dir)
    found = load_checkpoint(run_dir, options.checkpoint)
    policy = load_policy(config, found)
    task = config.task["name"]
    print(f"evaluating {found.path} on {task}: {options.episodes} episodes, seed {options.seed}", file=sys.stderr)
    result = evaluate_policy(config, policy, options.episodes, options.seed, options.num_threads)
    for split, rates in result.get("splits", {}).items():
        low, high = rates["success_at_end_ci95"]
        note = f"{rates['success_at_end']:.1%} of {rates['episodes']} episodes ({low:.1%} to {high:.1%})"
        print(f"instructions of split {split}: success {note}", file=sys.stderr)
    result |= {"run": str(run_dir), "checkpoint": found.path.name, "env_steps": found.env_steps}
    name = f"{found.path.name}_seed{options.seed}"
    write_json(run_dir / "eval" / f"{name}_episodes{options.episodes}.json", result)
    if options.video:
        path = run_dir / "videos" / f"{name}.mp4"
        note = f"filming {VIDEO_ENVS} episodes into {path}: every picture is ray cast, a minute or two on two cores"
        print(f"success {result['success_at_end']:.1%}; {note}", file=sys.stderr)
        result["video"] = str(record_video(config, policy, path, options.seed))
    return result


def load_checkpoint(run_dir: Path, name: str) -> checkpoint.Checkpoint:
    """The policy's part of a checkpoint: ``last`` (the newest that is whole) or ``step_<env_steps>``."""
    if name == "last":
        newest = checkpoint.load_latest(run_dir, only="policy")
        if newest is None:
            raise UserError(f"{run_dir} has no checkpoint yet")
        return newest
    found = checkpoint.newest_first(run_dir / "checkpoints")
    folders = {f"step_{int(path.name.removeprefix('step_'))}": path for path in found}
    prefix, _, steps = name.partition("_")
    key = f"step_{int(steps)}" if prefix == "step" and steps.isdecimal() else name
    if key not in folders:
        raise unknown_name("checkpoint", name, ["last", *folders])
    try:
        return checkpoint.load(folders[key], only="policy")
    except checkpoint.CorruptCheckpoint as error:
        raise UserError(f"{error}; checkpoint=last takes the newest that is whole") from error


def load_policy(config: RunConfig, found: checkpoint.Checkpoint) -> Policy:
    """The run's policy with a checkpoint's weights, on the CPU. UserError if the task has changed since."""
    env = make_env(config, num_envs=1, num_threads=1)
    env.close()
    policy = make_policy(config, env.spec)
    try:
        policy.load_state_dict(found.state)
    except RuntimeError as error:
        raise UserError(
            f"{found.path} does not fit the task and policy of this version of the code: {error}"
        ) from error
    return policy


def record_video(config: RunConfig, policy: Policy, path: Path, seed: int) -> Path:
    """An MP4 of the first episodes of an evaluation, side by side in real time, each below what the robot is told.

    Returns its path.
    """
    from embodied.report import video
    from embodied.report.caption import caption
    from envs.appearance import FRONT, Viewer

    env = make_env(config, VIDEO_ENVS, threads.available_cores())
    camera = replace(FRONT, width=VIDEO_SIZE[0], height=VIDEO_SIZE[1])
    viewer = Viewer(env, camera)
    try:
        first = first_env_seed(Purpose.EVALUATION, seed)
        video.record(env, policy, path, lambda: caption(viewer.render(), env.told), seed=first)
    finally:
        env.close()
    return path


def evaluate_policy(
    config: RunConfig, policy: Policy, episodes: int, seed: int, num_threads: int = 0
) -> dict[str, Any]:
    """The deterministic policy on ``episodes`` fixed initial states; see embodied.runtime.evaluate. 0 is all cores."""
    num_threads = num_threads or threads.available_cores()
    threads.use(num_threads)
    env = make_env(config, episodes, num_threads)
    try:
        return evaluate(policy, env, episodes, seed)
    finally:
        env.close()


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(evaluate_run, __doc__, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
