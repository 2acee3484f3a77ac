"""Drive a robot by a bundle's policy: ``python -m embodied.deploy bundle=<bundle dir> robot=sim [key=value ...]``

  robot=sim                   the simulated arm of the bundle, in a process of its own
  robot=<module>:<Class>      a robot of LeRobot, or any class with its methods
  robot_options='{"id": "a"}' options of its configuration class, JSON
  mapping=<file>              its names, units, signs and offsets; a person must have confirmed it
  propose_mapping=true        write a first draft of the mapping, and a picture of the poses that it means
  confirm_mapping=<name>      confirm the mapping with the arm in the default pose, again in the second; gripper open
  episodes=1  seed=0          episodes; with robot=sim they begin as those of embodied.eval do
  schedule=synchronous        synchronous, ensemble (temporal ensembling) or rtc (real-time chunking)
  execute=<E>                 actions executed of a chunk; by default as in training
  rate_hz=<rate>              commands per second, a whole multiple of the policy's rate, which is the default
  interpolation=hold|linear   targets between two control steps
  instruction="..."           for a policy that reads one; robot=sim has that of the episode
  server=ws://host:port       plan on a policy server (embodied.serve); limits are still those of the bundle here
  api_key_file=<file>         key of the server; or the environment variable EMBODIED_API_KEY
  noise=zero|seeded           noise of decisions; by default that of the bundle
  latency_ms=0                latency added to every inference
  plan_timeout_s=5            a policy without a chunk for so long hangs: the robot holds, then moves home
  speed=1.0                   share of the largest speed; limits can only be tightened
  confirm=false               ask before every action, and before the way home
  home=true                   move to the default pose after every episode
  perturbation=none|real      robot=sim: whether the arm differs from the one of training, as its robot's file says
  lockstep=false              robot=sim: let time pass only when it is waited for; faster, and repeatable
  report=<dir>                write report.html, result.json, interventions.jsonl and the episodes, each as it ends; at
                              last video.mp4, and data, a LeRobotDataset (without torch and pyarrow embodied.convert
                              makes one of the episodes)
  video=true                  with report: film the first episode (robot=sim)
  num_threads=1               threads of the inference

Emergency: press any key on the terminal. The robot holds where it is, and the deployment ends. Ctrl-C, SIGTERM or a
closed terminal stops in order: a robot that has moved moves home; once more, it stops on its way. Whatever happens is
reported, with the first cause. Last line of stdout: {"bundle", "robot", "episodes", "failed_episodes", "error",
"success_at_end", "success_at_end_ci95", "rate_hz", "missed_deadlines", "latency_ms_p99", "interventions", ...}.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError
from embodied.core.spec import joints_of
from embodied.core.user_files import sha256
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import BUNDLE_FILE, read_bundle
from embodied.deployment.bundle.runner import Planner, PolicyRunner, check_parity
from embodied.deployment.control.inference import Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Limits, Safety
from embodied.deployment.control.site import ask, site_of
from embodied.deployment.options import DeployOptions
from embodied.deployment.report import Deployment
from embodied.deployment.robots.setup import map_robot
from embodied.deployment.serving.protocol import read_api_key, require_packages
from embodied.deployment.validation import parse_words
from embodied.session.command import interrupt_on_signals, run_command
from embodied.session.deployed.deployment import DeploymentRun, claimed


def deploy(argv: Sequence[str]) -> dict[str, Any]:
    """Run episodes on a robot; return the result. UserError for bad input or no robot, Failed if something ended it."""
    options = parse_words(DeployOptions, argv)
    path = Path(options.bundle)
    bundle = read_bundle(path, with_policy=options.server is None)
    try:
        if options.propose_mapping or options.confirm_mapping is not None:
            return map_robot(options, bundle)
        options.check_fits(bundle)
        with interrupt_on_signals(), claimed(Path(options.report)) if options.report else nullcontext():
            return run_episodes(options, path, bundle)
    except ConnectionError as error:
        raise UserError(str(error)) from error


def run_episodes(options: DeployOptions, path: Path, bundle: Bundle) -> dict[str, Any]:
    """Run the phases of a deployment, each whatever became of the one before; return the result."""
    safety = Safety(bundle.arms, options.speed)
    with ExitStack() as parts:
        planner = planner_of(options, path, bundle, parts)
        print(notice(path, bundle, safety.limits), file=sys.stderr)
        site = parts.enter_context(site_of(options, path, bundle))
        inference = Inference(planner, site.clock, options.latency_ms / 1e3, options.lockstep, options.plan_timeout_s)
        parts.callback(inference.close)
        loop = ControlLoop(
            bundle, site.robot, inference, safety,
            schedule=options.schedule, execute=options.execute, rate_hz=options.rate_hz,
            interpolation=options.interpolation, noise=options.noise or bundle.noise,
            confirm=(lambda action: ask(f"{action}   execute?")) if options.confirm else None,
        )  # fmt: skip
        deployment = Deployment(bundle, options.bundle, site.robot.name, log=safety.log)
        run = DeploymentRun(options, loop, site, deployment)
        for phase in (run.episodes, run.go_home, run.keep_holding, parts.close, run.report):
            run.attempt(phase)
    return run.outcome()


def planner_of(options: DeployOptions, path: Path, bundle: Bundle, opened: ExitStack) -> Planner:
    """Return the runner of the bundle, warmed up, or the client of a server with the same policy."""
    if options.server is None:
        runner = PolicyRunner(path, options.num_threads)
        check_parity(runner, path)  # and the first inference takes longer than the others
        return runner
    require_packages(f"server={options.server}")
    from embodied.deployment.serving.client import RemotePlanner

    key = read_api_key(options.api_key_file)
    return opened.enter_context(RemotePlanner(options.server, key, options.plan_timeout_s, bundle))


def notice(path: Path, bundle: Bundle, limits: Limits) -> str:
    """Return what is printed before a robot moves: the hash of the bundle's description, and a table of limits."""
    lines = [
        f"{bundle.origin.policy} policy for {bundle.origin.task} on {bundle.robot}",
        f"{path / BUNDLE_FILE} has SHA-256 {sha256(path / BUNDLE_FILE)}",
        "limits (rad, m, s)      low       high      largest speed   largest lead",
    ]
    columns = zip(limits.low_J, limits.high_J, limits.max_velocity_J, limits.max_lead_J, strict=True)
    for name, (low, high, speed, lead) in zip(joints_of(bundle.arms), columns, strict=True):
        lines.append(f"{name:20} {low:+9.4f}  {high:+9.4f}  {speed:15.4f} {lead:14.4f}")
    ends = {"each finger": (limits.finger_low_m, limits.finger_high_m)}
    for side, lows, highs in zip(bundle.arms, limits.workspace_low_m, limits.workspace_high_m, strict=True):
        ends |= {f"{side}tool, {axis}": box for axis, box in zip("xyz", zip(lows, highs, strict=True), strict=True)}
    lines += [f"{name:20} {low:+9.4f}  {high:+9.4f}" for name, (low, high) in ends.items()]
    if len(bundle.arms) > 1:
        lines.append("nothing keeps the two arms from touching each other, also on the way home")
    return "\n".join(lines)


main = partial(run_command, deploy, __doc__, first="bundle")


if __name__ == "__main__":
    sys.exit(main())
