"""Training and evaluation under a latency of inference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied import compare, export
from embodied.report.metrics import read_metrics
from embodied.runtime import checkpoint
from tests.commands.helpers import Outcome, run, run_collect, run_eval, run_train

FLOW = [
    "task=reach", "policy=flow", "runtime=sync", "num_envs=8", "runtime.decisions=4", "device=cpu", "max_staleness=0",
    "policy.horizon=6", "policy.execute=4", "policy.actor_hidden=[16]", "policy.critic_hidden=[16]",
    "policy.head_hidden=[16]", "algo.num_minibatches=2", "runtime.sim_threads=1", "runtime.actor_threads=1",
    "runtime.learner_threads=1", "eval_episodes=0", "runtime.eval_every=0",
]  # fmt: skip
DELAYS = "policy.max_delay=2"


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.load_latest(run_dir)
    assert found is not None
    return found.state["policy"]


def assert_same(a: Path, b: Path) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of 1,024 steps with delays."""
    out = tmp_path_factory.mktemp("delayed") / "run"
    outcome = run_train(*FLOW, DELAYS, "total_steps=1024", f"out={out}")
    assert outcome.code == 0, outcome.stderr
    return out, outcome


def test_ratio_is_one_at_the_start_of_every_update(delayed: tuple[Path, Outcome]) -> None:
    rows = read_metrics(delayed[0] / "metrics.jsonl")
    assert len(rows) >= 8
    assert all(row["train/ratio_first"] == pytest.approx(1.0, abs=1e-5) for row in rows)
    assert all(row["train/approx_kl"] > 0 for row in rows)


def test_threads_change_nothing_and_a_run_resumes_exactly(delayed: tuple[Path, Outcome], tmp_path: Path) -> None:
    assert run_train(*FLOW, DELAYS, "runtime=local", "total_steps=1024", f"out={tmp_path / 'local'}").code == 0
    assert_same(tmp_path / "local", delayed[0])
    assert run_train(*FLOW, DELAYS, "total_steps=512", f"out={tmp_path / 'parts'}").code == 0
    resumed = run_train(f"resume={tmp_path / 'parts'}", "total_steps=1024")
    assert "bit for bit" in resumed.stderr
    assert_same(tmp_path / "parts", delayed[0])


def test_grpo_compares_whole_episodes_with_delays(tmp_path: Path) -> None:
    grpo = ["algo=grpo", "algo.group_size=4", "algo.num_minibatches=2", "runtime.decisions=10", "total_steps=640"]
    outcome = run_train(*FLOW, DELAYS, *grpo, f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["iterations"] == 2
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["train/ratio_first"] == pytest.approx(1.0, abs=1e-5) for row in rows)


def test_imitation_learns_with_prefixes_and_reinforcement_goes_on(tmp_path: Path) -> None:
    assert run_collect("task=reach", "episodes=4", "num_threads=1", f"out={tmp_path / 'demos'}").code == 0
    sft = ["algo=sft", f"data={tmp_path / 'demos'}", "algo.updates=4", "algo.batch_size=8"]
    model = [word for word in FLOW if word.startswith("policy.")]
    outcome = run_train("task=reach", *model, DELAYS, *sft, "eval_episodes=0", f"out={tmp_path / 'sft'}")
    assert outcome.code == 0, outcome.stderr
    outcome = run_train(*FLOW, DELAYS, f"init={tmp_path / 'sft'}", "total_steps=128", f"out={tmp_path / 'rl'}")
    assert outcome.code == 0, outcome.stderr


def test_evaluation_under_a_latency(delayed: tuple[Path, Outcome]) -> None:
    run = f"run={delayed[0]}"
    trained, none, some = (
        run_eval(run, "episodes=3", *words).result for words in ([], ["delay_ms=0"], ["delay_ms=100"])
    )
    assert [result["delay_ms"] for result in (trained, none, some)] == [None, 0.0, 100.0]
    assert len({result["return_mean"] for result in (trained, none, some)}) == 3
    written = [json.loads(path.read_text()) for path in delayed[0].glob("eval/*_delay100ms_episodes3.json")]
    assert written == [some]
    refused = run_eval(run, "delay_ms=150")
    assert (refused.code, refused.stdout) == (2, "")
    expected = "delay_ms: got 150, which is 3 control steps, allowed: at most policy.max_delay=2, which is 100 ms"
    assert expected in refused.stderr
    assert "delay_ms: got -1" in run_eval(run, "delay_ms=-1").stderr


def test_a_comparison_refuses_a_latency_that_a_bundle_does_not_know(
    delayed: tuple[Path, Outcome], tmp_path: Path
) -> None:
    bundle, result = tmp_path / "bundle", tmp_path / "result.json"
    assert run(export.main, [f"run={delayed[0]}", f"out={bundle}", "episodes=2", "device=cpu"]).code == 0
    words = [f"policies=[{bundle},{bundle}]", "limit=2", f"out={result}", "device=cpu", "num_threads=1"]
    refused = run(compare.main, [*words, "delay_ms=300"])
    assert (refused.code, refused.stdout, result.exists()) == (2, "", False), refused.stderr
    expected = "delay_ms: got 300, which is 6 control steps, allowed: at most policy.max_delay=2, which is 100 ms"
    assert expected in refused.stderr.splitlines()[-1]
    assert run(compare.main, [*words, "delay_ms=100"]).code == 3


@pytest.mark.parametrize(("delay_ms", "nearest"), [("74", "50 and 100"), ("100.5", "100 and 150"), ("1", "0 and 50")])
def test_a_latency_that_is_no_whole_control_step_is_refused(
    trained: tuple[Path, Outcome], delay_ms: str, nearest: str
) -> None:
    refused = run_eval(f"run={trained[0]}", f"delay_ms={delay_ms}")
    assert (refused.code, refused.stdout) == (2, "")
    expected = f"delay_ms: got {delay_ms}, allowed: whole control steps of 50 ms, the nearest {nearest}"
    assert expected in refused.stderr


def test_a_policy_that_knows_no_delay_is_evaluated_under_any(trained: tuple[Path, Outcome]) -> None:
    run = f"run={trained[0]}"
    plain, none, late = (run_eval(run, "episodes=4", *words).result for words in ([], ["delay_ms=0"], ["delay_ms=200"]))
    assert [result["delay_ms"] for result in (plain, none, late)] == [0.0, 0.0, 200.0]
    assert plain == none
    assert late["return_mean"] != plain["return_mean"]
    assert late["episode_length_mean"] == plain["episode_length_mean"]


def test_options_that_do_not_fit_write_nothing(tmp_path: Path) -> None:
    outcome = run_train(*FLOW, "policy.max_delay=3", f"out={tmp_path / 'run'}")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "max_delay: got 3, allowed: at most 2" in outcome.stderr
    assert not (tmp_path / "run").exists()
