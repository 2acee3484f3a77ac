"""Drive a robot by a bundle's policy: ``python -m embodied.deploy bundle=<bundle dir> robot=sim [key=value ...]``

  robot=sim                   the simulated arm of the bundle, in a process of its own
  robot=<module>:<Class>      a robot of LeRobot, or any class with its methods
  robot_options='{"id": "a"}' options of its configuration class, JSON
  mapping=<file>              its names, units, signs and offsets; a person must have confirmed it
  propose_mapping=true        write a first draft of the mapping, and a picture of the poses that it means
  confirm_mapping=<name>      confirm the mapping after a look at the picture
  episodes=1  seed=0          episodes; with robot=sim they begin as those of embodied.eval do
  schedule=synchronous        synchronous, ensemble (temporal ensembling) or rtc (real-time chunking)
  execute=<E>                 actions executed of a chunk; by default as in training
  rate_hz=<rate>              commands per second, a whole multiple of the policy's rate, which is the default
  interpolation=hold|linear   targets between two control steps
  instruction="..."           for a policy that reads one; robot=sim takes that of the episode
  server=ws://host:port       plan on a policy server (embodied.serve); limits are still those of the bundle here
  api_key_file=<file>         key of the server; or the environment variable EMBODIED_API_KEY
  noise=zero|seeded           noise of decisions; by default that of the bundle
  latency_ms=0                latency added to every inference
  plan_timeout_s=5            a policy without a chunk for so long hangs: the robot holds, then moves home
  speed=1.0                   share of the largest speed; limits can only be tightened
  confirm=false               ask before every action
  home=true                   move to the default pose at the end
  perturbation=none|real      robot=sim: how much the arm differs from the one of training
  lockstep=false              robot=sim: let time pass only when it is waited for; faster, and repeatable
  report=<dir>                write report.html, result.json, video.mp4 and data, a LeRobotDataset of what happened
                              (without torch and pyarrow episodes.npz, which embodied.convert makes one of)
  video=true                  with report: film the first episode (robot=sim)
  num_threads=1               threads of the inference

Emergency: press any key on the terminal. The robot holds where it is, and the deployment ends. Ctrl-C or SIGTERM stops
in order: the robot moves home. Either way what happened is reported. Last line of stdout: {"bundle", "robot",
"episodes", "success_at_end", "success_at_end_ci95", "rate_hz", "missed_deadlines", "latency_ms_p99", "interventions",
...}.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import UserError
from embodied.deployment.api_key import read_api_key
from embodied.deployment.bundle import Bundle, read_bundle
from embodied.deployment.episodes import EPISODES_FILE, save_episodes
from embodied.deployment.home import MAX_S, move_home
from embodied.deployment.inference import Inference
from embodied.deployment.keys import EmergencyKey
from embodied.deployment.loop import ControlLoop
from embodied.deployment.notice import notice
from embodied.deployment.options import DeployOptions, as_mapping, parse_words
from embodied.deployment.record import EpisodeRecord
from embodied.deployment.report import Deployment
from embodied.deployment.runner import Planner, PolicyRunner, check_parity
from embodied.deployment.safety import Limits, Safety
from embodied.deployment.stage import Stage, ask, stage_of
from embodied.deployment.wire import require_packages
from embodied.run.command import Stopped, run_command

FILM_FPS = 10


def deploy(argv: Sequence[str]) -> dict[str, Any]:
    """Run episodes on a robot; return the command's result. UserError for bad input, and for a robot that is gone."""
    try:
        return run_episodes(parse_words(DeployOptions, argv))
    except ConnectionError as error:
        raise UserError(str(error)) from error


def run_episodes(options: DeployOptions) -> dict[str, Any]:
    """Run the episodes of a deployment and report; see ``deploy``."""
    path = Path(options.bundle)
    bundle = read_bundle(path, with_policy=options.server is None)
    options.check_fits(bundle)
    safety = Safety(bundle.arm, Limits.of(bundle.arm).tightened(options.speed))
    with ExitStack() as stack:
        stack.enter_context(interrupt_on_sigterm())
        planner = stack.enter_context(planner_of(options, path, bundle))
        print(notice(path, bundle, safety.limits), file=sys.stderr)
        stage = stack.enter_context(stage_of(options, path, bundle))
        if options.confirm_mapping is not None or options.propose_mapping:
            return {"bundle": options.bundle, "robot": stage.robot.name, "mapping": options.mapping}
        deployment = Deployment(bundle, options.bundle, stage.robot.name)
        inference = Inference(planner, stage.clock, options.latency_ms / 1e3, options.lockstep, options.plan_timeout_s)
        key = EmergencyKey()
        stack.callback(inference.close)
        loop = ControlLoop(
            bundle, stage.robot, inference, safety, stage.clock,
            schedule=options.schedule, execute=options.execute, rate_hz=options.rate_hz,
            interpolation=options.interpolation, noise=options.noise or bundle.noise,
            confirm=ask_action if options.confirm else None, stop=key.pressed,
        )  # fmt: skip
        end: BaseException | None = None
        try:
            for episode in range(options.episodes):
                run_episode(loop, stage, deployment, options, episode, key)
        except (KeyboardInterrupt, Exception) as error:  # of a bug too: what was recorded must not be lost
            if loop.record.reason and all(record is not loop.record for record in deployment.records):
                deployment.records.append(loop.record)
            end = error
        known = end is None or isinstance(end, KeyboardInterrupt | EmergencyStop | OSError | UserError)
        if known and options.home and stage.robot.is_connected and not key.pressed():
            go_home(loop, stage, key, end)
        if key.pressed():
            stage.keep_holding()
        deployment.log = list(safety.log)
    result = deployment.result()
    if options.report is not None:
        result["report"] = write_report(deployment, options, stage.frames)
    if isinstance(end, KeyboardInterrupt | EmergencyStop):
        raise Stopped(result)
    if isinstance(end, OSError | UserError):
        raise UserError(str(end)) from end
    if end is not None:
        raise end
    return result


@contextmanager
def planner_of(options: DeployOptions, path: Path, bundle: Bundle) -> Iterator[Planner]:
    """Yield the runner of the bundle, warmed up, or the client of a server with the same policy."""
    if options.server is None:
        runner = PolicyRunner(path, options.num_threads)
        check_parity(runner, path)  # and the first inference takes longer than the others
        yield runner
        return
    from embodied.deployment.client import RemotePlanner

    require_packages(f"server={options.server}")
    key = read_api_key(options.api_key_file)
    with RemotePlanner(options.server, api_key=key, timeout_s=options.plan_timeout_s, bundle=bundle) as client:
        yield client


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that the robot moves home; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class EmergencyStop(Exception):
    """A person pressed the emergency key."""


def run_episode(
    loop: ControlLoop, stage: Stage, deployment: Deployment, options: DeployOptions, episode: int, key: EmergencyKey
) -> EpisodeRecord:
    """Run one episode and add its record and its outcome to the deployment. EmergencyStop if the key was pressed."""
    instruction = stage.begin(options.seed, episode)
    with key if loop.confirm is None else nullcontext():  # who is asked before every action stops by an answer
        if key.watching:
            print("press any key to stop the robot at once", file=sys.stderr, flush=True)
        record = loop.run(options.instruction or instruction, seed=options.seed * 1_000_003 + episode)
    if key.pressed():
        raise EmergencyStop
    success = stage.judge()
    deployment.records.append(record)
    if success is not None:
        deployment.successes.append(success)
    solved = {True: "solved", False: "not solved", None: "not judged"}[success]
    print(
        f"episode {episode + 1} of {options.episodes}: {solved}, {record.reason}, {record.rate_hz:.1f} Hz, "
        f"{record.missed_deadlines} missed deadlines, {sum(record.interventions.values())} interventions",
        file=sys.stderr,
    )
    if episode == 0 and options.report is not None and options.video:
        stage.film()
    return record


def go_home(loop: ControlLoop, stage: Stage, key: EmergencyKey, end: BaseException | None) -> None:
    """Move the robot home; say so if it cannot be done, such as with a sensor that fails.

    end: error that ended the episodes, which is reported later.
    """
    try:
        with key:
            reached = move_home(stage.robot, loop.bundle.arm, loop.safety, stage.clock, key.pressed)
    except (OSError, UserError) as error:
        why = "" if str(error) == str(end) else f": {error}"
        print(f"the robot stays where it is{why}", file=sys.stderr)
        return
    if not reached and not key.pressed():
        print(f"the robot did not reach its default pose within {MAX_S:g} s, and holds", file=sys.stderr)


def ask_action(action: str) -> bool:
    """Ask on the terminal whether an action may be executed."""
    return ask(f"{action}   execute?")


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
    page = deployment.write(folder, as_mapping(options), video)
    keep_episodes(folder, deployment)
    return str(page)


def keep_episodes(folder: Path, deployment: Deployment) -> None:
    """Write the data set; on a robot's computer, without its libraries, what ``embodied.convert`` makes one of."""
    try:
        from embodied.run.recording import write_episodes
    except ImportError as error:
        file = folder / EPISODES_FILE
        save_episodes(file, deployment)
        print(
            f"{error}, so {file} has the episodes; where all of embodied-rl is installed, 'python -m embodied.convert "
            f"source={EPISODES_FILE} bundle=<bundle dir> out=<new dir>' makes a data set of it",
            file=sys.stderr,
        )
        return
    write_episodes(folder / "data", deployment)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(deploy, __doc__, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
