"""A task in a file of the user's: trained, and evaluated elsewhere; runs, bundles and data of strangers run no code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gymnasium
import pytest
import yaml

from embodied import eval as evaluate
from embodied import preflight, train
from embodied.core.errors import UserError
from embodied.deployment.bundle.format import read_simulation
from embodied.envs import register
from embodied.session.results.page import write_page
from tests.commands.helpers import SMALL, run

FILE = """
from embodied.envs.tasks.reach import Reach, ReachConfig


class Mine(Reach):
    config: ReachConfig

    def success(self):
        return super().success() | True
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of ``my_task.py``, which was trained in its folder."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("my_task.py").write_text(FILE)
    outcome = run(train.main, ["my_task.py:Mine", *SMALL[1:], "total_steps=64"])
    assert outcome.code == 0, outcome.stderr
    [found] = (tmp_path / "mine" / "runs" / "my_task.Mine").iterdir()
    assert outcome.result["eval"]["task"] == "my_task:Mine"
    assert outcome.result["eval"]["success_at_end"] == 1.0
    monkeypatch.chdir(tmp_path)
    return found


def test_a_run_is_evaluated_and_resumed_elsewhere_and_knows_its_version_of_the_file(
    trained: Path, tmp_path: Path
) -> None:
    words = [f"run={trained}", "episodes=2", "num_threads=1"]
    assert run(evaluate.main, words).result["success_at_end"] == 1.0
    shutil.move(trained, tmp_path / "moved")
    (tmp_path / "mine" / "my_task.py").unlink()
    words[0], copy = "run=moved", "task_file=moved/my_task.py"
    outcome = run(evaluate.main, words)
    assert outcome.code == 2
    assert copy in outcome.stderr
    assert run(evaluate.main, [*words, copy]).result["success_at_end"] == 1.0
    outcome = run(train.main, ["resume=moved", "total_steps=128", copy])
    assert outcome.result["env_steps"] == 128


def test_what_strangers_made_runs_no_code(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.core.user_files._named", set())  # as in a process of its own
    evil = trained / "evil.py"
    evil.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    config = yaml.safe_load((trained / "config.yaml").read_text())
    config["task"] |= {"name": f"{evil}:Mine", "task_sha256": "0"}
    (trained / "config.yaml").write_text(yaml.safe_dump(config))
    assert run(evaluate.main, [f"run={trained}"]).code == 2
    write_page([trained])
    (trained / "simulation.json").write_text(json.dumps({"task": config["task"], "sim": {}}))
    with pytest.raises(UserError, match=r"task_file="):
        read_simulation(trained)
    (trained / "meta").mkdir()
    (trained / "meta" / "info.json").write_text("{}")
    (trained / "meta" / "recorded_with.json").write_text(json.dumps({"task": f"{evil}:Mine"}))
    outcome = run(preflight.main, [f"data={trained}"])
    assert "name its file on the command line" in outcome.stderr
    assert not (tmp_path / "ran").exists()
    for task, answer in (("my_task:Mine", "task is missing: give task="), ("gym/my_envs:Mine-v0", "my_envs")):
        (trained / "meta" / "recorded_with.json").write_text(json.dumps({"task": task}))
        assert answer in run(preflight.main, [f"data={trained}"]).stderr


def test_gymnasium_makes_it(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(FILE)
    pool = gymnasium.make_vec(register(f"{tmp_path}/my_task.py:Mine"), num_envs=2)
    pool.reset(seed=0)
    assert pool.step(pool.action_space.sample())[-1]["success"].all()
    pool.close()
