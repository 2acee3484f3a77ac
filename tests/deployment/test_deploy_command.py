"""The command that drives a robot by a bundle, and its report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embodied import convert as convert_command
from embodied import deploy as deploy_command
from embodied.data import read
from embodied.data.lerobot import read_features
from embodied.deployment.bundle.runner import PolicyRunner
from tests.commands.helpers import run
from tests.deployment.exports import flow_bundle
from tests.deployment.servers import serving


def convert(report: Path, out: Path) -> Path:
    """Make a data set of all episodes of a report."""
    words = [f"source={report / 'episodes'}", f"bundle={flow_bundle()}", f"out={out}", "keep_failures=true"]
    outcome = run(convert_command.main, words)
    assert outcome.code == 0, outcome.stderr
    return out


def test_the_command_drives_the_robot_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "report"
    words = [f"bundle={flow_bundle()}", "robot=sim", "episodes=2", "lockstep=true", "video=false", f"report={report}"]
    outcome = run(deploy_command.main, words)
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    assert {"bundle", "robot", "episodes", "success_at_end", "success_at_end_ci95", "rate_hz", "missed_deadlines",
            "latency_ms_p99", "interventions"} <= set(result)  # fmt: skip
    assert result["rate_hz"] == pytest.approx(20.0)
    page = (report / "report.html").read_text()
    assert "Success at the end" in page
    assert "<svg" in page
    assert json.loads((report / "result.json").read_text())["options"]["episodes"] == 2
    assert f"convert source={report / 'episodes'} " in outcome.stderr
    all_of_them = convert(report, tmp_path / "data")
    recorded = read(all_of_them)
    assert len(recorded.state_FS) == 160
    assert recorded.instructions == ("put the red cube into the blue tray",)
    assert float(recorded.action_FA.abs().max()) <= 1.0 + 1e-5
    again = run(deploy_command.main, words)
    assert again.code == 2
    assert "exists" in again.stderr


def test_a_data_set_of_a_deployment_shows_where_the_robot_waited(tmp_path: Path) -> None:
    words = [f"bundle={flow_bundle()}", "robot=sim", "episodes=1", "lockstep=true", "latency_ms=120", "video=false"]
    outcome = run(deploy_command.main, [*words, "schedule=synchronous", f"report={tmp_path / 'report'}"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["control_steps_hz"] < 15 < outcome.result["rate_hz"]
    assert outcome.result["waited_ticks"] >= 20
    time_F = read_features(convert(tmp_path / "report", tmp_path / "data"), ("timestamp",))["timestamp"][:, 0]
    assert time_F[0] == 0
    waits = time_F.diff() > 0.1
    assert 5 < int(waits.sum()) < len(waits) / 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("episodes=0", "episodes: got 0, allowed: at least 1"),
        ("episode=1", "unknown key 'episode'. Did you mean 'episodes'"),
        ("robot=franka", "unknown robot 'franka'"),
        ("perturbation=rael", "perturbation: got 'rael', allowed: none, real"),
        ("episodes=two", "episodes: got 'two', allowed: an integer"),
        ("speed=2", "limits can only be tightened"),
        ("schedule=async", "schedule: got 'async', allowed: synchronous, ensemble, rtc"),
        ("rate_hz=33", "whole multiples"),
        ("interpolation=cubic", "interpolation: got 'cubic', allowed: hold, linear"),
        ("bundle=/nowhere", "is not a directory"),
        ("instruction=x", "instruction: robot=sim takes that of its episode"),
        ('robot_options={"id": "a"}', "robot_options: robot=sim has those of its bundle, and takes no others"),
        ("api_key_file=key", "api_key_file is for server=ws://host:port"),
        ("latency_ms=-1", "latency_ms: got -1, allowed: 0 to 10000"),
        ("plan_timeout_s=0", "plan_timeout_s: got 0, allowed: 0.001 to 600"),
    ],
)
def test_bad_input_is_refused(word: str, message: str) -> None:
    outcome = run(deploy_command.main, [f"bundle={flow_bundle()}", "lockstep=true", word])
    assert outcome.code == 2, outcome.stderr
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("word", ["lockstep=true", "perturbation=real"])
def test_what_only_a_simulated_arm_can_do_is_refused_for_a_real_one(word: str) -> None:
    outcome = run(deploy_command.main, [f"bundle={flow_bundle()}", "robot=x:Y", "mapping=toy.json", word])
    assert outcome.code == 2, outcome.stderr
    assert f"{word} is for robot=sim" in outcome.stderr


def test_it_plans_on_a_server_with_the_same_policy(tmp_path: Path) -> None:
    words = [f"bundle={flow_bundle()}", "lockstep=true", "home=false"]
    here = run(deploy_command.main, words).result
    with serving(PolicyRunner(flow_bundle())) as (server, port):
        there = run(deploy_command.main, [*words, f"server=ws://127.0.0.1:{port}"])
        assert there.code == 0, there.stderr
        assert server.requests == 20
    assert there.result["tracking_error_rad"] == here["tracking_error_rad"]
    gone = run(deploy_command.main, [*words, f"server=ws://127.0.0.1:{port}"])
    assert gone.code == 2
    assert "no policy server at" in gone.stderr


def test_a_bundle_without_its_policy_is_refused(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(flow_bundle(), tmp_path / "bundle"))
    (copy / "policy.onnx").unlink()
    outcome = run(deploy_command.main, [f"bundle={copy}"])
    assert outcome.code == 2
    assert "lacks policy.onnx" in outcome.stderr
