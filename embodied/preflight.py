"""Examine demonstrations before imitation: ``python -m embodied.preflight data=demos/x [task=x] [key=value ...]``

  task=...  <option>=...    as for embodied.train algo=sft; data sets of embodied.collect know task and environment

Replays recorded actions in the simulator and compares the states, imitates one episode, and looks at the numbers. One
line for each fault says what is wrong, where, and what to do; serious faults come first.
Last line of stdout: {"data", "task", "episodes", "frames", "passed", "faults": [{"name", "serious", "what", "where",
"cure"}], "replay", "overfit", "wall_s"}. Exit code 1: a fault is serious. 2: no data set, or one of another task.
"""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from embodied.core.config import GROUPS, parse_overrides
from embodied.core.errors import UserError, missing_key, wrong_value
from embodied.core.user_files import present
from embodied.session.command import Failed, run_command
from embodied.session.config import compose_run
from embodied.session.defaults import compose_new
from embodied.session.files import read_json


def preflight(argv: Sequence[str]) -> dict[str, Any]:
    """Examine a data set; return the command's result. UserError for bad input, Failed if a fault is serious."""
    began = time.monotonic()
    words = parse_overrides(argv)
    if "data" not in words:
        check_keys(words)
        raise missing_key("data")
    path = Path(str(words["data"]))
    if not (path / "meta" / "info.json").is_file():
        raise UserError(f"data={path} is not a LeRobotDataset: it has no meta/info.json")
    from embodied.data.lerobot import RECORDED_WITH  # these import torch

    recorded = read_json(path / RECORDED_WITH)
    task_of_file = re.fullmatch(r"\w+:\w*", str(recorded.get("task")))  # its folder is not recorded
    if "task" not in words and ("task" not in recorded or task_of_file):
        check_keys(words)
        raise missing_key("task")
    of_task = {key[5:]: value for key, value in recorded.items() if key.startswith("task.") and key not in words}
    of_task = {f"task.{key}": value for key, value in present(of_task, path).items()}
    words = {"algo": "sft", **recorded, **of_task, **words}
    if words["algo"] != "sft":
        raise wrong_value("algo", str(words["algo"]), "sft, which learns from data")
    config = compose_new(words, print)
    if config.task.title != (task := recorded.get("task", config.task.title)):
        raise wrong_value("task", config.task.title, f"{task}, which this data set is of")
    from embodied.trainers.preflight import examine

    result, faults = examine(config)
    print(*faults, *(f"{name}: {result[name]['told']}" for name in ("replay", "overfit") if result[name]), sep="\n")
    serious = sum(fault.serious for fault in faults)
    result |= {"passed": not serious, "faults": [fault._asdict() for fault in faults]}
    result["wall_s"] = round(time.monotonic() - began, 1)
    if serious:
        raise Failed(f"{serious} serious fault{'s' * (serious > 1)}, the first: {faults[0].name}", result, 1)
    print("no serious faults found" if faults else "no faults found")
    return result


def check_keys(words: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown key; options of the parts, which depend on the task, are not looked at."""
    compose_run({"algo": "sft"} | {key: value for key, value in words.items() if key.partition(".")[0] not in GROUPS})


main = partial(run_command, preflight, __doc__, first="data")

if __name__ == "__main__":
    sys.exit(main())
