"""List the tasks, or check one of them: ``python -m embodied.tasks [check=<task> [key=value ...]]``

Without options: for each task observations, actions, instructions and time limit, as text on stderr and as a JSON
object on stdout. Of families with many environments only the names are listed.

  check=<task>     check that a task, ours or another's, keeps the contract of an environment: one line per check on
                   stderr, {"task", "passed", "checks": {<check>: {"passed", "why"}}} on stdout; exit code 2 if one
                   fails; a check that another failure left out has passed: null
  num_envs=4       environments of the check
  resets=10000     resets after which nothing may have leaked
  steps=50         control steps to which episodes are cut, so that they end in slow simulators too
  max_minutes=10   time within which all checks end; episodes and resets become fewer for it
  seed=0           seed of the episodes
  task.<option>=... sim.<option>=... policy=...   as for train; the policy's cameras are checked too

For tasks on our MuJoCo pool the robot is checked first: areas in reach, fingers, gap, standing still, holding, and
whether the scripted expert, if there is one, solves 95% of 200 episodes.

  picture=<file>   a PNG of four moments of an episode of the expert; without one, of an arm that stands still

docs/simulators.md says what each check means.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from embodied.core.config import GROUPS, PRESETS, parse_overrides
from embodied.core.errors import UserError, one_line, unknown_name
from embodied.core.options import Positive, PositiveInt, Seed, config_dataclass, from_mapping
from embodied.core.spec import Box, Discrete, EnvSpec, MultiDiscrete
from embodied.core.user_files import refuse_places
from embodied.envs import make_sampler
from embodied.envs.registry import DEFAULT_FAMILY, FAMILIES, TASKS, split_name
from embodied.session.command import Failed, run_command
from embodied.session.config import SHORTHANDS, compose_run

MANY = 20  # environments of a family beyond which they are not described
OVERRIDES = tuple({*GROUPS, PRESETS, *SHORTHANDS} - {"task"})
"""Keys without a dot that ``check=`` passes on to the configuration of a run."""


@config_dataclass
class CheckConfig:
    """Options of ``check=``; see the top of this file."""

    check: str
    num_envs: PositiveInt = 4
    resets: PositiveInt = 10_000
    steps: PositiveInt = 50
    max_minutes: Positive = 10.0
    seed: Seed = 0
    picture: str = ""


def tasks(argv: Sequence[str]) -> dict[str, Any]:
    """List the tasks, or check the one that ``check=`` names. Failed if it does not keep the contract."""
    values = parse_overrides(argv)
    if values:
        return check(values)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    found: list[dict[str, Any]] = []
    ids_of, broken = ids_of_families()
    large = {family: ids for family, ids in ids_of.items() if len(ids) > MANY}
    others = [f"{family}/{id}" for family, ids in ids_of.items() if family not in large for id in ids]
    for name in (*TASKS.names(), *others):  # as ``task=`` takes them; ours come first
        try:
            found.append(describe_task(name))
        except UserError as error:
            broken[name] = one_line(error)
    for task in found:
        console.print(Text(task["task"], style="bold"), Text(f"— {task['instruction']}" if task["instruction"] else ""))
        if task["instructions"] > 1:
            goals = ", ".join(f"{count} {split}" for split, count in task["goals"].items())
            texts = f"{task['instructions']} texts, such as: {task['example']}"
            console.print(Text(f"  instruction {texts}; goals: {goals}"))
        console.print(Text(f"  observes    {', '.join(task['observes'])}  ({task['state_dim']} numbers)"))
        console.print(Text(f"  actions     {task['actions_meaning']}, {task['control_hz']:g} Hz"))
        console.print(Text(f"  time limit  {task['time_limit_s']:g} s, {task['max_episode_steps']} steps\n"))
    for family, ids in large.items():
        examples = ", ".join(f"{family}/{id}" for id in ids[:: max(1, len(ids) // 3)][:3])
        console.print(Text(family, style="bold"), Text(f"— {len(ids)} environments, such as {examples}\n"))
    for name, why in broken.items():
        console.print(Text(name, style="bold"), Text(f"— cannot be used: {why}\n"))
    return {"tasks": found, "families": large, "broken": broken}


def check(values: dict[str, Any]) -> dict[str, Any]:
    """Run all checks of a task. values: ``CheckConfig`` and overrides of a run. Failed if a check fails."""
    own = {key: value for key, value in values.items() if key in CheckConfig.__dataclass_fields__}
    options = from_mapping(CheckConfig, own)
    overrides = {key: value for key, value in values.items() if key not in own}
    for key in overrides:
        if "." not in key and key not in OVERRIDES:
            raise unknown_name("key", key, {*CheckConfig.__dataclass_fields__, *OVERRIDES})
    refuse_places()
    config = compose_run({"task": options.check, **overrides})
    from embodied.envs.checks.conformance import run_checks  # these import torch
    from embodied.runtime import threads
    from embodied.session.factories import make_env, make_spec

    make_spec(config)  # what cannot be served is bad input, and no failure of a check
    make, seconds = partial(make_env, config, num_threads=threads.available_cores()), 60 * options.max_minutes

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    checks: dict[str, Any] = {}
    results = run_checks(make, options.num_envs, options.seed, options.resets, options.steps, seconds, note)
    if split_name(config.task.name)[0] == config.sim.name == DEFAULT_FAMILY:
        from embodied.envs.checks.robot import EPISODES, check_robot

        results = chain(check_robot(make(EPISODES, cameras=()), note), results)
    for result in results:
        checks[result.name] = {"passed": result.passed, "why": result.why}
        if result.passed is not None:
            why = f": {result.why}" if result.why else ""
            print(f"{result.name:14} {'ok' if result.passed else 'failed'}{why}", file=sys.stderr, flush=True)
    failed = [name for name, found in checks.items() if found["passed"] is False]
    if missed := [name for name, found in checks.items() if found["passed"] is None]:
        print(f"not reached: {', '.join(missed)}", file=sys.stderr, flush=True)
    elif options.picture and not checks.get("expert", {"why": ""})["why"].startswith("raised"):
        draw(make, Path(options.picture))
    verdict = {"task": options.check, "passed": not failed, "checks": checks}
    if failed:
        raise Failed(f"task {options.check} does not pass: {', '.join(failed)} failed", verdict)
    return verdict


def draw(make: Callable[[int], Any], path: Path) -> None:
    """Write a picture of four moments of an episode, of the scripted expert if there is one; else actions are zero."""
    from embodied.data.images import encode_png
    from embodied.envs.base.actions import random_actions
    from embodied.report.video import grid

    with closing(make(1)) as env:
        if env.film is None:
            raise UserError(f"picture: {env.spec.task} cannot be rendered")
        env.reset(make_sampler(env))
        zero = 0 * random_actions(env.spec.action, 1, 1, 0)
        act = env.expert or zero.clone
        try:
            act()
        except UserError:  # a task of ours without an expert
            act = zero.clone
        render, steps, frames = env.film(480, 360), env.spec.max_episode_steps, []
        for step in range(steps):
            if step % max(1, steps // 3) == 0 or step == steps - 1:
                frames.append(render()[0])
            env.step(act())
    path.write_bytes(encode_png(grid(np.stack(frames[:4]))))


def ids_of_families() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the ids of all families but ours, and why families that cannot be loaded cannot."""
    found: dict[str, list[str]] = {}
    broken: dict[str, str] = {}
    for family in FAMILIES.names():
        try:
            if family != DEFAULT_FAMILY:
                found[family] = list(FAMILIES[family].build().ids())
        except Exception as error:  # third-party code may raise anything, for instance if a library is missing
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            broken[family] = f"{kind}{one_line(error)}"
    return found, broken


def describe_task(name: str) -> dict[str, Any]:
    from embodied.session.factories import make_spec

    spec = make_spec(compose_run({"task": name}))
    goals: dict[str, set[str]] = {}
    for goal, split in zip(spec.goals, spec.splits, strict=True):
        goals.setdefault(split, set()).add(goal)
    return {
        "task": name,
        "instruction": TASKS[name].build.instruction if name in TASKS.names() else "".join(spec.texts[:1]),
        "instructions": len(spec.instructions),
        "example": "".join(spec.texts[:1]),
        "goals": {split: len(of_split) for split, of_split in goals.items()},
        "observes": [term.name for term in spec.state],
        "state_dim": spec.state_dim,
        "privileged_dim": spec.privileged_dim,
        "actions": list(spec.action_names),
        "actions_meaning": actions_of(spec),
        "control_hz": round(1.0 / spec.control_dt_s, 3),
        "time_limit_s": round(spec.max_episode_steps * spec.control_dt_s, 3),
        "max_episode_steps": spec.max_episode_steps,
    }


def actions_of(spec: EnvSpec) -> str:
    match spec.action:
        case Discrete(names):
            return f"one of {', '.join(names)}"
        case MultiDiscrete(names, counts):
            return ", ".join(f"{name}: one of {count}" for name, count in zip(names, counts, strict=True))
        case Box():
            return f"{', '.join(spec.action.names)}, each in [-1, 1]"


main = partial(run_command, tasks, __doc__, first="check")

if __name__ == "__main__":
    sys.exit(main())
