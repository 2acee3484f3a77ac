"""Python files of users: which may be imported, from where, and what is wrong with them."""

from __future__ import annotations

import os
import pickle
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.core import user_files
from embodied.core.errors import UserError
from embodied.envs.registry import TASKS

MINE = "from embodied.core.options import config_dataclass\n\n\n@config_dataclass\nclass Options:\n    size: int = 3\n"
OPTIONS = """
from embodied.envs.tasks.base import Task
from embodied.envs.tasks.config import TaskConfig


class Own(TaskConfig):
    length_m: float = 0.1


class Mine(Task):
    instruction = "x"
    observed = observed_by_critic = rewards = success = lambda self: None
"""
LIFT = "from embodied.envs.tasks.lift import Lift\n\n\nclass Mine(Lift): ...\n"


def written(folder: Path, text: str, name: str = "my_task.py") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def section(path: Path) -> dict[str, str]:
    return {"name": f"{path}:Mine", "task_sha256": user_files.sha256(path)}


def test_other_processes_find_what_a_file_defines(tmp_path: Path) -> None:
    options = user_files.load(written(tmp_path, MINE)).Options(size=7)
    (tmp_path / "pickled").write_bytes(pickle.dumps(options))
    code = "import pickle, pathlib; print(pickle.loads(pathlib.Path('pickled').read_bytes()).size)"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environ) == b"7\n"


def test_bytecode_that_lies_beside_a_file_is_not_run(tmp_path: Path) -> None:
    path = written(tmp_path, "x = 666\n")
    py_compile.compile(str(path))
    times = path.stat()
    path.write_text("x = 111\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert user_files.load(path).x == 111


def test_a_file_that_a_run_names_must_be_where_and_what_it_was(tmp_path: Path) -> None:
    path, run = written(tmp_path / "mine", "a = 1\n"), tmp_path / "run"
    recorded = section(path)
    assert user_files.recorded(recorded, run) == recorded
    copy = written(run, path.read_text())
    path.write_text("a = 2\n")
    with pytest.raises(UserError, match=f"my_task.py, is missing or has changed: .* task_file={copy}"):
        user_files.recorded(recorded, run)
    path.unlink()
    with pytest.raises(UserError, match=r"my_task.py, is missing or has changed: "):
        user_files.recorded(recorded, run)
    assert user_files.name_words(["run=x", f"task_file={copy}"]) == ["run=x"]
    assert user_files.recorded(recorded, run) == section(copy)


def test_a_module_that_came_with_a_run_is_not_imported_for_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, section = tmp_path / "run", {"name": "gym/brought.inner:Env-v0"}
    (run / "brought").mkdir(parents=True)
    (run / "brought" / "__init__.py").write_text("raise SystemExit('the code of a stranger runs')")
    assert user_files.recorded(section, run) == section
    monkeypatch.syspath_prepend(run)  # as in that folder
    with pytest.raises(UserError, match="the module brought of its task came with it: work in another folder"):
        user_files.recorded(section, run)
    assert user_files.recorded({"name": "gym/gymnasium:CartPole-v1"}, run)


def test_a_file_that_came_with_a_run_is_imported_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "run", "raise SystemExit('the code of a stranger runs')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"came with it: name the file .* if you trust it: task_file="):
        user_files.recorded(section(path), tmp_path / "run")
    with pytest.raises(UserError, match="came with it"):  # a relative path is one of the stranger's choice
        user_files.recorded(section(path) | {"name": "run/my_task.py:Mine"}, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="name its file on the command line"):
        user_files.checked(section(path))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1\n", "my_tsk.py:A", r"unknown file '.*my_tsk.py'. Did you mean '.*my_task.py'"),
        (LIFT, "my_task.py", r"unknown class in .* ''. Allowed: Mine"),
        ("import math\nmath.no\n", "my_task.py:A", r"importing .* AttributeError in my_task.py, line 2: .*'no'"),
        ("\n\ndef f(:\n", "my_task.py:A", r"importing .* SyntaxError in my_task.py, line 3: invalid syntax"),
        ("class A: ...\n", "my_task.py:A", r"the class must inherit Task"),
        (LIFT, "my_task.py:Mnie", r"unknown class .* Did you mean 'Mine'\? Allowed: Mine$"),
        (
            "from embodied.envs.tasks.base import Task\n\n\nclass A(Task):\n    instruction = 'x'\n",
            "my_task.py:A", "the class lacks observed, observed_by_critic, rewards, success",
        ),
        (OPTIONS + "    config: Own\n", "my_task.py:Mine", "write @config_dataclass above class Own"),
        (OPTIONS, "my_task.py:Mine", "the class lacks the annotation config: Own"),
        (
            "from embodied.envs.tasks.lift import Lift\nfrom embodied.envs.tasks.config import LiftConfig\n"
            "class Mine(Lift): ...\nclass Own(LiftConfig): ...\n",
            "my_task.py:Mine", "the class lacks the annotation config: Own",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task_of_a_file_is_named(tmp_path: Path, text: str, name: str, message: str) -> None:
    written(tmp_path, text)
    with pytest.raises(UserError, match=message):
        TASKS[f"{tmp_path}/{name}"]
