"""A run on a simulator that is not ours: no success, no exact resume, no images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied import collect, train
from embodied import eval as eval_command
from embodied.core.options import config_dataclass
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.envs import FAMILIES
from embodied.envs.base.episodic import Advance
from tests.runtime.point_env import PointEnv, point_spec

SMALL = [
    "task=plain/point",
    "policy=gaussian",
    "policy.actor_hidden=[8]",
    "policy.critic_hidden=[8]",
    "num_envs=8",
    "runtime=sync",
    "runtime.decisions=4",
    "runtime.eval_every=1",
    "runtime.eval_episodes=2",
    "eval_episodes=4",
    "device=cpu",
]


@config_dataclass
class NoOptions:
    """No options."""


class Plain(PointEnv):
    """Point masses that know no success and cannot be restored."""

    resumes_exactly = False

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, spec=plain_spec())

    def advance(self, action_NA: Any, ids: Any) -> Advance:
        return replace(super().advance(action_NA, ids), outcomes={})


def plain_spec() -> EnvSpec:
    return replace(point_spec(), task="plain/point", outcomes=())


class PlainFamily:
    """See ``embodied.envs.registry.Family``."""

    def ids(self) -> Sequence[str]:
        return ["point"]

    def task_config(self, id: str) -> type[Any]:
        return NoOptions

    def spec(self, id: str, task: Any, cameras: Sequence[CameraSpec] = ()) -> EnvSpec:
        return plain_spec()

    def make(self, id: str, task: Any, *, num_envs: int, num_threads: int, sim: Any, cameras: Any = ()) -> Plain:
        return Plain(num_envs)


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    FAMILIES.register("plain", config=NoOptions)(PlainFamily)
    yield
    del FAMILIES._entries["plain"]


def run(capsys: pytest.CaptureFixture[str], main: Any, *words: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON result and stderr of a command."""
    code = main(words)
    captured = capsys.readouterr()
    return code, json.loads(captured.out.splitlines()[-1]) if code == 0 else {}, captured.err


def test_it_trains_evaluates_and_resumes_with_new_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code, result, log = run(capsys, train.main, *SMALL, "total_steps=256", f"out={out}")
    assert code == 0, log
    assert "a resumed run continues with new episodes" in log
    assert result["eval"]["episodes"] == 4
    assert not [key for key in result["eval"] if "success" in key]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/return_mean" in row for row in rows)
    assert not [key for key in rows[-1] if "success" in key]
    code, result, log = run(capsys, train.main, f"resume={out}", "total_steps=512")
    assert code == 0, log
    assert result["env_steps"] >= 512


def test_what_it_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code, _, log = run(capsys, train.main, *SMALL, "total_steps=256", "stop_at_success=0.9", f"out={out}")
    assert code == 2
    assert "stop_at_success: task plain/point reports no success" in log
    code, _, log = run(capsys, train.main, *SMALL, "total_steps=256", "repeat_failures=0.5", f"out={out}")
    assert code == 2
    assert "repeat_failures: task plain/point reports no success" in log
    code, _, log = run(capsys, train.main, *SMALL, "total_steps=256", "cut_after_success=4", f"out={out}")
    assert code == 2
    assert "cut_after_success: task plain/point reports no success" in log
    assert not out.exists()
    assert run(capsys, train.main, *SMALL, "total_steps=256", f"out={out}")[0] == 0
    config = out / "config.yaml"
    config.write_text(config.read_text().replace("cut_after_success: 0", "cut_after_success: 8"))
    code, _, log = run(capsys, train.main, f"resume={out}", "total_steps=512")
    assert code == 0, f"a run of an earlier version, where it did nothing: {log}"
    code, _, log = run(capsys, eval_command.main, f"run={out}", "episodes=4", "video=true")
    assert code == 2
    assert "the environments of task plain/point cannot be rendered" in log
    assert run(capsys, eval_command.main, f"run={out}", "episodes=4")[0] == 0


def test_discrete_choices_do_not_fit_a_continuous_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, log = run(capsys, train.main, *SMALL, "policy=categorical", "total_steps=256", f"out={tmp_path / 'run'}")
    assert code == 2
    assert "CategoricalPolicy gives choices between discrete actions" in log
    assert "task plain/point needs continuous actions" in log


def test_demonstrations_need_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, log = run(capsys, collect.main, "task=plain/point", "episodes=2", f"out={tmp_path / 'demos'}")
    assert code == 2
    assert "task=plain/point reports no success" in log
    assert not list(tmp_path.iterdir())


def test_envs_must_be_as_their_family_describes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(plain_spec(), max_episode_steps=30, control_dt_s=0.2)
    monkeypatch.setattr(PlainFamily, "spec", lambda *args: other)
    code, _, log = run(capsys, train.main, *SMALL, "total_steps=256", f"out={tmp_path / 'run'}")
    assert code == 2
    assert "its spec and that of its family differ in control_dt_s, max_episode_steps" in log


def test_envs_are_closed_when_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Plain] = []

    def make(self: PlainFamily, id: str, task: Any, *, num_envs: int, **options: Any) -> Plain:
        made.append(Plain(num_envs))
        return made[-1]

    monkeypatch.setattr(PlainFamily, "make", make)
    code, _, _ = run(capsys, train.main, *SMALL, "policy=categorical", "total_steps=256", f"out={tmp_path / 'run'}")
    assert code == 2
    assert made
    assert all(env.closed for env in made)


def test_a_simulator_that_does_not_run_the_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = {"warp": "sim=warp does not run task=plain/point: it needs plain", "wrap": "mean 'warp'?"}
    for sim, message in messages.items():
        code, _, log = run(capsys, train.main, *SMALL, f"sim={sim}", f"out={tmp_path / 'run'}")
        assert code == 2
        assert message in log
        assert not (tmp_path / "run").exists()
