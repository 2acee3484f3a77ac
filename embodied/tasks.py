"""List the tasks: ``python -m embodied.tasks``

For each task: observations, actions, instructions and time limit, as text on stderr and as a JSON object on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from embodied.core.errors import UserError
from embodied.core.spec import Box, Discrete, EnvSpec, MultiDiscrete
from embodied.run.command import run_command
from embodied.run.config import compose_run
from embodied.run.factories import make_spec
from envs import FAMILIES, TASKS
from envs.registry import DEFAULT_FAMILY


def tasks(argv: Sequence[str]) -> dict[str, Any]:
    """Describe all tasks in their default configuration."""
    if argv:
        raise UserError(f"'{argv[0]}': this command takes no options")
    found = [describe_task(name) for name in task_names()]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for task in found:
        console.print(Text(f"{task['task']}", style="bold"), Text(f"— {task['instruction']}"))
        if task["instructions"] > 1:
            goals = ", ".join(f"{count} {split}" for split, count in task["goals"].items())
            texts = f"{task['instructions']} texts, such as: {task['example']}"
            console.print(Text(f"  instruction {texts}; goals: {goals}"))
        console.print(Text(f"  observes    {', '.join(task['observes'])}  ({task['state_dim']} numbers)"))
        console.print(Text(f"  actions     {task['actions_meaning']}, {task['control_hz']:g} Hz"))
        console.print(Text(f"  time limit  {task['time_limit_s']:g} s, {task['max_episode_steps']} steps\n"))
    return {"tasks": found}


def task_names() -> list[str]:
    """Return the tasks of all families as ``task=`` takes them; those of ours come first."""
    others = [family for family in FAMILIES.names() if family != DEFAULT_FAMILY]
    return [*TASKS.names(), *(f"{family}/{id}" for family in others for id in FAMILIES[family].build().ids())]


def describe_task(name: str) -> dict[str, Any]:
    """Describe a task in its default configuration."""
    spec = make_spec(compose_run({"task": name}))
    return {
        "task": name,
        "instruction": TASKS[name].build.instruction if name in TASKS.names() else "".join(spec.texts[:1]),
        "instructions": len(spec.instructions),
        "example": "".join(spec.texts[:1]),
        "goals": {split: len(goals) for split, goals in goals_by_split(spec).items()},
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
    """Return what an action is, in words."""
    match spec.action:
        case Discrete(names):
            return f"one of {', '.join(names)}"
        case MultiDiscrete(names, counts):
            return ", ".join(f"{name}: one of {count}" for name, count in zip(names, counts, strict=True))
        case Box():
            return f"{', '.join(spec.action.names)}, each in [-1, 1]"


def goals_by_split(spec: EnvSpec) -> dict[str, set[str]]:
    """Return the goals of the instructions of each split."""
    found: dict[str, set[str]] = {}
    for goal, split in zip(spec.goals, spec.splits, strict=True):
        found.setdefault(split, set()).add(goal)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(tasks, __doc__, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
