"""Every program of docs/use_with.md runs as it is printed, but for fewer steps."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from embodied import train
from tests.commands.helpers import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "use_with.md"
TEXT = PAGE.read_text()
PROGRAMS = [
    (heading, program)
    for heading, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    for program in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
]
STEPS = 2048  # one rollout of 64 envs, and of stable-baselines3's PPO
STEPS_WITH_CAMERAS = 128


@pytest.mark.slow(reason="trains with stable-baselines3, skrl and torchrl")
@pytest.mark.parametrize(("heading", "program"), PROGRAMS, ids=[heading for heading, _ in PROGRAMS])
def test_a_program_of_the_page_runs(
    heading: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -c constraints.txt -e '.[trainers]'")
    monkeypatch.chdir(tmp_path)
    if "read_run" in program:
        words = ["task=gym/Pendulum-v1", "total_steps=2048", "eval_episodes=1", "out=runs/pendulum"]
        assert run(train.main, words).code == 0
    names: dict[str, Any] = {"__name__": "program"}
    steps = STEPS_WITH_CAMERAS if "cameras=" in program else STEPS
    exec(compile(re.sub(r"[13]00_000", str(steps), program), heading, "exec"), names)
    if "model" in names:
        assert names["model"].num_timesteps == steps
    if "images" in names:
        assert {image.shape for image in names["images"]} == {(240, 320, 3)}
