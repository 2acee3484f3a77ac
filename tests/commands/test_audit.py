"""``embodied.audit``: a certificate holds for a run as it was trained, and each broken claim fails its check."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied import audit, train
from embodied.algos.ppo import PPO
from embodied.core.process.interrupts import INTERRUPTED
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime import checkpoint
from embodied.runtime.local import LocalRuntime
from embodied.trainers import audit as checks
from tests.commands.helpers import SMALL, Outcome, run, run_train

NAMES = [check.__name__.removeprefix("check_") for check in checks.CHECKS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "run"
    assert run_train(*SMALL, "eval_episodes=0", "total_steps=320", f"out={path}").code == 0
    return path


def run_audit(*words: str) -> Outcome:
    return run(audit.main, list(words))


@pytest.mark.slow(reason="exports a policy")
def test_a_run_holds_until_a_weight_changes_by_a_thousandth(trained: Path) -> None:
    outcome = run_audit(str(trained))
    assert outcome.code == 0, outcome.stderr
    found = outcome.result
    assert (found["passed"], found["open"], list(found["checks"])) == (True, [], NAMES)
    assert all(check["passed"] and check["value"] <= check["tolerance"] for check in found["checks"].values())
    assert json.loads((trained / "certificate.json").read_text()) == found
    again = run_audit(str(trained))
    assert again.code == 0, "nothing has changed"
    last = checkpoint.load_latest(trained)
    assert last is not None
    weight = next(value for key, value in last.state["policy"].items() if key.startswith("actor"))
    weight[0] *= 1.001
    checkpoint.save(trained, last.env_steps, last.state)  # with hashes that fit
    outcome = run_audit(str(trained))
    assert outcome.code == 1
    folder = f"checkpoints/{last.path.name}"
    assert outcome.result["changed"] == [f"{folder}/manifest.json", f"{folder}/policy.pt"]
    assert "policy.pt changed since" in outcome.stderr
    (trained / "certificate.json").unlink()


@pytest.fixture
def certified(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run with three checkpoints and a certificate, of no checks."""
    monkeypatch.setattr(checks, "CHECKS", ())
    run_dir = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    last = checkpoint.load_last(run_dir)
    for steps in (64, 128):
        checkpoint.save(run_dir, steps, last.state)
    assert run_audit(str(run_dir)).code == 0
    return run_dir


def test_the_message_names_the_file_to_remove(certified: Path) -> None:
    with (certified / "config.yaml").open("a") as file:
        file.write("# changed\n")
    outcome = run_audit(str(certified))
    path = certified / "certificate.json"
    assert (outcome.code, outcome.result["changed"]) == (1, ["config.yaml"])
    assert f"config.yaml changed since {path} was written; remove {path} to examine" in outcome.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"checks": 3}', None])
def test_a_certificate_that_is_of_no_checkpoint_is_not_replaced_without_a_word(
    certified: Path, text: str | None
) -> None:
    path = certified / "certificate.json"
    if text is None:
        shutil.rmtree(certified / "checkpoints" / "step_320")
    else:
        path.write_text(text)
    before, outcome = path.read_bytes(), run_audit(str(certified))
    reason = "cannot be read" if text else "is of step_320, the last checkpoint is step_128"
    assert (outcome.code, path.read_bytes()) == (1, before)
    assert f"{path} {reason}; remove {path} to examine" in outcome.stderr
    path.unlink()
    assert run_audit(str(certified)).code == 0


def test_a_run_that_was_trained_further_is_examined_and_says_so(certified: Path) -> None:
    assert run_train(f"resume={certified}", "total_steps=384").code == 0
    outcome = run_audit(str(certified))
    assert (outcome.code, outcome.result["checkpoint"]) == (0, "step_384"), outcome.stderr
    assert "is of step_320, the last checkpoint is step_384, which is examined now" in outcome.stderr


def test_resuming_at_a_limit_trains_nothing_says_why_and_leaves_the_certificate(
    certified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CERTIFIED_FROM_S", 0.0)
    before = [(certified / name).read_bytes() for name in ("certificate.json", "config.yaml")]
    outcome = run_train(f"resume={certified}", "total_steps=256", "max_minutes=0.0001", "algo.epochs=2")
    assert (outcome.code, outcome.result["env_steps"]) == (0, 320)
    reached = "total_steps=256 and max_minutes=0.0001 is reached; raise it to go on"
    assert f"nothing to train: {reached}" in outcome.stderr
    assert "trained for" not in outcome.stderr
    assert [(certified / name).read_bytes() for name in ("certificate.json", "config.yaml")] == before
    assert run_audit(str(certified)).code == 0


def test_limits_of_a_resumed_run_that_got_nowhere_are_no_change(certified: Path) -> None:
    text = (certified / "config.yaml").read_text()
    (certified / "config.yaml").write_text(text.replace("total_steps: 320", "total_steps: 640"))
    assert text != (certified / "config.yaml").read_text()
    assert run_audit(str(certified)).code == 0


def shifted(act: Callable[..., Any]) -> Callable[..., Any]:
    """An actor that records another log-probability than that of its decision."""

    def method(*args: Any) -> Any:
        sample = act(*args)
        sample.log_prob_N.add_(0.01)
        return sample

    return method


def drifting(update: Callable[..., Any]) -> Callable[..., Any]:
    """An update that moves a weight in any case."""

    def method(self: PPO, *args: Any) -> Any:
        metrics = update(self, *args)
        with torch.no_grad():
            next(self.policy.parameters()).add_(1e-6)
        return metrics

    return method


def shaky(plan: Callable[..., Any]) -> Callable[..., Any]:
    """A policy with noise of its own."""
    return lambda *args: plan(*args) + 0.1 * torch.rand(1)


def forgetful(load: Callable[..., Any]) -> Callable[..., Any]:
    """An optimiser that begins anew."""
    return lambda self, state: load(self, state | {"optimizer": self.optimizer.state_dict()})


def hasty(learn: Callable[..., Any]) -> Callable[..., Any]:
    """A runtime that learns from a part of the batch."""
    return lambda self, batch: learn(self, [*batch, *batch])


@pytest.mark.parametrize(
    ("kind", "method", "broken", "failing"),
    [
        (GaussianPolicy, "act", shifted, {"ratio", "kl"}),
        (PPO, "update", drifting, {"learning_rate_0"}),
        (GaussianPolicy, "plan", shaky, {"evaluation"}),
        (PPO, "load_state_dict", forgetful, {"round_trip", "resume"}),
        (LocalRuntime, "learn", hasty, {"sync_equals_local"}),
    ],
)
def test_a_broken_claim_fails_its_check(
    trained: Path, kind: type, method: str, broken: Any, failing: set[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(kind, method, broken(getattr(kind, method)))
    tried = [check for check in checks.CHECKS if check.__name__ not in ("check_environment", "check_bundle")]
    monkeypatch.setattr(checks, "CHECKS", tried)
    outcome = run_audit(str(trained))
    assert outcome.code == 1
    assert {name for name, found in outcome.result["checks"].items() if not found["passed"]} == failing
    assert all(f"{name:18} FAILED" in outcome.stderr for name in failing)


def test_what_a_run_does_not_claim_passes_with_the_reason(tmp_path: Path) -> None:
    words = ["task=gym/CartPole-v1", "num_envs=8", "total_steps=64", "eval_episodes=0", f"out={tmp_path / 'run'}"]
    assert run_train(*words).code == 0
    outcome = run_audit(f"run={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    reasons = {name: found["reason"] for name, found in outcome.result["checks"].items() if found["value"] is None}
    assert list(reasons) == ["resume", "sync_equals_local", "bundle"]
    assert reasons["resume"] == "not claimed: its environments cannot restore a state"
    assert "only continuous actions can be exported" in reasons["bundle"]


def test_a_training_of_more_than_a_minute_ends_with_a_certificate_in_a_tenth_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CERTIFIED_FROM_S", 0.0)
    monkeypatch.setattr(train, "CERTIFIED_WITHIN_S", 0.0)
    outcome = run_train(*SMALL, "eval_episodes=0", "total_steps=64", f"out={tmp_path / 'run'}")
    assert outcome.result["certificate"] == {"passed": True, "open": NAMES}
    assert "bundle             open    no time was left" in outcome.stderr


def test_a_signal_during_the_certificate_leaves_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = train.with_certificate  # of so short a training it would have a few milliseconds
    monkeypatch.setattr(train, "with_certificate", lambda result: certificate({**result, "wall_s": 100.0}))
    monkeypatch.setattr(checks, "CHECKS", (lambda audit: signal.raise_signal(signal.SIGTERM),))
    outcome = run_train(*SMALL, "eval_episodes=2", "total_steps=64", f"out={tmp_path / 'run'}")
    assert outcome.code == INTERRUPTED
    assert (outcome.result["env_steps"], outcome.result["eval"]["episodes"]) == (64, 2)
    assert Path(outcome.result["page"]).is_file()
    assert "certificate" not in outcome.result
    assert not (tmp_path / "run" / "certificate.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is not a directory"),
        (["{empty}"], "has no checkpoint yet"),
        (["{empty}", "episodes=3"], "unknown key 'episodes'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: {}\n")
    outcome = run_audit(*(word.format(empty=tmp_path) for word in words))
    assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1)
    assert message in outcome.stderr
    assert not (tmp_path / "certificate.json").exists()
