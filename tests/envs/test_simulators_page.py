"""The environment that docs/simulators.md prints passes the check and trains, by the commands beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "simulators.md").read_text()


@pytest.mark.slow(reason="runs two commands, one of which trains")
def test_the_environment_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n( +# my_module.py\n.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_module.py").write_text(re.sub(r"^   ", "", program, flags=re.MULTILINE))
    commands = re.findall(r"^ +python -m (embodied.* (?:check|task)=gym/my_module:Corridor-v0 .*)$", TEXT, re.MULTILINE)
    check, train = (re.sub("resets=500", "resets=20", command).split() for command in commands)
    train = [word for word in train if not word.startswith("total_steps")]
    train += ["total_steps=1024", "runtime.eval_every=0", "eval_episodes=4", "out=run", "device=cpu"]
    for words in (check, train):
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] >= 1024
