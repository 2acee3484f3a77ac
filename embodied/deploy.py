"""Drive a robot by a bundle's policy: ``python -m embodied.deploy bundle=<bundle dir> robot=sim [key=value ...]``

  robot=sim                   the simulated arm of the bundle, in a process of its own
  episodes=1  seed=0          episodes; with robot=sim they begin as those of embodied.eval do
  schedule=synchronous        synchronous, ensemble (temporal ensembling) or rtc (real-time chunking)
  execute=<E>                 actions executed of a chunk; by default as in training
  rate_hz=<rate>              commands per second, a whole multiple of the policy's rate, which is the default
  interpolation=hold|linear   targets between two control steps
  instruction="..."           for a policy that reads one; robot=sim takes that of the episode
  noise=zero|seeded           noise of decisions; by default that of the bundle
  latency_ms=0                latency added to every inference
  speed=1.0                   share of the largest speed; limits can only be tightened
  confirm=false               ask before every action
  home=true                   move to the default pose at the end
  perturbation=none|real      robot=sim: how much the arm differs from the one of training
  lockstep=false              robot=sim: let time pass only when it is waited for; faster, and repeatable
  report=<dir>                write report.html, result.json, video.mp4 and data, a LeRobotDataset of what happened
  video=true                  with report: film the first episode (robot=sim)
  num_threads=1               threads of the inference

Press Ctrl-C to stop: the robot moves home, and what happened is reported. Last line of stdout: {"bundle", "robot",
"episodes", "success_at_end", "success_at_end_ci95", "rate_hz", "missed_deadlines", "latency_ms_p99", "interventions",
...}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import UserError, unknown_name
from embodied.deployment.bundle import SIMULATION_FILE, read_bundle
from embodied.deployment.home import move_home
from embodied.deployment.loop import ControlLoop, EpisodeRecord, Inference
from embodied.deployment.options import as_mapping, parse_words
from embodied.deployment.report import Deployment
from embodied.deployment.robots.sim import PERTURBATIONS, SimRobot
from embodied.deployment.runner import PolicyRunner
from embodied.deployment.safety import Limits, Safety
from embodied.run.command import Stopped, run_command

FILM_FPS = 10


@dataclass(frozen=True)
class DeployOptions:
    """Options of the command; see the top of this file."""

    bundle: str
    robot: str = "sim"
    episodes: int = 1
    seed: int = 0
    schedule: str = "synchronous"
    execute: int | None = None
    rate_hz: float | None = None
    interpolation: str = "hold"
    instruction: str | None = None
    noise: str | None = None
    latency_ms: float = 0.0
    speed: float = 1.0
    confirm: bool = False
    home: bool = True
    perturbation: str = "none"
    lockstep: bool = False
    report: str | None = None
    video: bool = True
    num_threads: int = 1

    def check(self) -> None:
        """Raise UserError for values that are not allowed."""
        for name, low in (("episodes", 1), ("seed", 0), ("num_threads", 1)):
            if getattr(self, name) < low:
                raise UserError(f"{name}: got {getattr(self, name)}, allowed: at least {low}")
        if self.robot != "sim":
            raise unknown_name("robot", self.robot, ["sim"])
        if self.perturbation not in PERTURBATIONS:
            raise unknown_name("perturbation", self.perturbation, PERTURBATIONS)
        if self.noise not in (None, "zero", "seeded"):
            raise UserError(f"noise: got '{self.noise}', allowed: zero, seeded")
        if self.report is not None and Path(self.report).exists():
            raise UserError(f"report={self.report} exists; give a new directory")


def deploy(argv: Sequence[str]) -> dict[str, Any]:
    """Run episodes on a robot; return the command's result. UserError for bad input."""
    options = parse_words(DeployOptions, argv)
    path = Path(options.bundle)
    bundle = read_bundle(path)
    safety = Safety(bundle.arm, Limits.of(bundle.arm).tightened(options.speed))
    frames = None
    with ExitStack() as stack:
        planner = PolicyRunner(path, options.num_threads)
        planner.parity()  # the first inference takes longer than the others
        simulation = json.loads((path / SIMULATION_FILE).read_text())
        robot = SimRobot(bundle, simulation, PERTURBATIONS[options.perturbation], options.lockstep)
        stack.callback(robot.disconnect)
        robot.connect()
        deployment = Deployment(bundle, options.bundle, robot.name)
        inference = Inference(planner, robot, options.latency_ms / 1e3, simulated=options.lockstep)
        stack.callback(inference.close)
        loop = ControlLoop(
            bundle, robot, inference, safety, robot,
            schedule=options.schedule, execute=options.execute, rate_hz=options.rate_hz,
            interpolation=options.interpolation, noise=options.noise or bundle.noise,
            confirm=ask if options.confirm else None,
        )  # fmt: skip
        end: BaseException | None = None
        try:
            for episode in range(options.episodes):
                run_episode(loop, robot, deployment, options, episode)
                if episode == 0 and options.report and options.video:
                    print("filming the first episode: every picture is ray cast, a minute or more", file=sys.stderr)
                    frames = robot.frames()
        except (KeyboardInterrupt, ConnectionError, UserError) as error:
            deployment.records.append(loop.record)
            end = error
        if options.home and robot.is_connected:
            move_home(robot, bundle.arm, safety, robot)
        deployment.log = list(safety.log)
    result = deployment.result()
    if options.report is not None:
        result["report"] = write_report(deployment, options, frames)
    if isinstance(end, KeyboardInterrupt):
        raise Stopped(result)
    if end is not None:
        raise UserError(str(end))
    return result


def run_episode(
    loop: ControlLoop, robot: SimRobot, deployment: Deployment, options: DeployOptions, episode: int
) -> EpisodeRecord:
    """Run one episode and add its record and its outcome to the deployment."""
    instruction = robot.reset(options.seed, episode)
    record = loop.run(options.instruction or instruction, seed=options.seed * 1_000_003 + episode)
    outcome = robot.outcome()
    deployment.records.append(record)
    deployment.successes.append(bool(outcome["success"]))
    solved = "solved" if outcome["success"] else "not solved"
    print(
        f"episode {episode + 1} of {options.episodes}: {solved}, {record.reason}, {record.rate_hz:.1f} Hz, "
        f"{record.missed_deadlines} missed deadlines, {sum(record.interventions.values())} interventions",
        file=sys.stderr,
    )
    return record


def ask(action: str) -> bool:
    """Ask on the terminal whether an action may be executed."""
    print(f"{action}   execute? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def write_report(deployment: Deployment, options: DeployOptions, frames: np.ndarray[Any, Any] | None) -> str:
    """Write the page with its video and data; return the page's path."""
    assert options.report is not None
    folder = Path(options.report)
    folder.mkdir(parents=True)
    video = None
    if frames is not None and len(frames):
        from embodied.report.video import open_mp4

        with open_mp4(folder / "video.mp4", FILM_FPS) as write:
            for frame in frames:
                write(frame)
        video = "video.mp4"
    from embodied.run.recording import write_episodes

    write_episodes(folder / "data", deployment)
    return str(deployment.write(folder, as_mapping(options), video))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(deploy, __doc__, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
