"""The bench command: its result, its ratios, and that what it compares is the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count, islice
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from mujoco.batch import Batch

from embodied import bench
from embodied.benchmarks import adapters, gpu, suite, train
from embodied.benchmarks.asynchrony import ARRIVAL, ASYNC, SYNC, Mode, Setup, measured
from embodied.benchmarks.measure import Report, in_turns, paired
from embodied.benchmarks.peers.own import PeerBatch
from embodied.benchmarks.sim import PEERS, Replay
from embodied.benchmarks.train import Costs, bound
from embodied.core.config import parse_overrides
from embodied.core.errors import UserError
from embodied.envs import make_pool, make_sampler
from embodied.session.config import compose_run
from tests.commands.helpers import SMALL, run

SIM_RATIOS = {
    "pool_over_engine_1024", "pool_flatness_256_8192", "pool_over_envpool", "rss_gb_4096",
    "envpool_adapter_over_bare", "gym_adapter_over_bare", "gym_light_adapter_over_bare", "maniskill_adapter_over_bare",
    "warp_pool_over_engine", "envpool_adapter_over_paused", "gym_light_1024_adapter_over_bare",
    "envpool_1024_adapter_over_bare", "envpool_1024_adapter_over_paused",
}  # fmt: skip
SIM_RATIOS |= {f"{ours}_over_{peer}" for ours in ("pool", "engine", "engine_reduced") for peer in PEERS}
OF_OTHERS = {name for name in SIM_RATIOS if any(other in name for other in ("envpool", "maniskill", "warp", "mjbatch"))}

ASYNC_RATIOS = {
    "tail_over_sync", "tail_over_bound", "tail_async_2_over_bound", "inference_over_bound", "robot_over_bound",
}  # fmt: skip


@pytest.mark.slow(reason="starts a process for the memory of a pool, and compiles kernels of Warp")
@pytest.mark.timeout(900)
def test_bench_sim_reports_every_ratio(tmp_path: Path) -> None:
    outcome = run(bench.main, ["sim", "short=true", f"out={tmp_path / 'sim.json'}"])
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    assert set(result) == {"what", "machine", "ratios", "rows"}
    assert SIM_RATIOS - OF_OTHERS <= set(result["ratios"]) <= SIM_RATIOS
    assert all(value > 0 for value in result["ratios"].values())
    assert 0.1 < result["ratios"]["rss_gb_4096"] < 2
    assert result["machine"]["cores"] >= 1
    assert all(set(row) == {"name", "value", "unit", "settings"} for row in result["rows"])
    assert json.loads((tmp_path / "sim.json").read_text()) == result


def test_a_family_that_cannot_be_built_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it is missing, does not build, or only the bare simulator beside it does not."""

    def no_display(*sizes: int) -> None:
        raise RuntimeError("no\nVulkan device")

    report = Report("sim")
    adapters.compare(report, "gym_light", "gym/CartPole-v1", no_display, 2, 1, 2, 4)
    adapters.compare(report, "gym", "gym/NoSuchTask-v1", no_display, 2, 1, 2, 4)
    assert report.ratios == {}
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "gym_light is left out: RuntimeError: no Vulkan device"
    assert said[1].startswith("gym is left out: UserError: ")


@pytest.mark.slow(reason="trains four times, a few steps each")
def test_bench_train_reports_the_bound_and_how_it_was_measured() -> None:
    outcome = run(bench.main, ["train", "short=true"])
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    assert set(result["ratios"]) == {"train_over_bound", "local_over_sync"}
    rows = {row["name"]: row for row in result["rows"]}
    assert {f"{part}_{how}" for part in ("collect", "learn") for how in ("sync", "side_by_side")} <= set(rows)
    assert rows["train_local"]["settings"]["task"]["name"] == "pick_place"
    assert rows["train_local"]["settings"]["policy"]["name"] == "flow"
    assert len(rows["bound"]["settings"]["of_rounds"]) == 2
    assert len(rows["train_local"]["settings"]["of_rounds"]) == 2


def test_bench_deploy_measures_a_bundle_a_loop_and_a_server() -> None:
    outcome = run(bench.main, ["deploy", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios = outcome.result["ratios"]
    assert set(ratios) == {
        "flow_p99_ms", "missed_share_50hz", "server_over_unbatched_flow", "server_over_one_client_flow"
    }  # fmt: skip
    assert 0 < ratios["flow_p99_ms"] < 1000
    assert 0 <= ratios["missed_share_50hz"] <= 1
    rows = {row["name"]: row for row in outcome.result["rows"]}
    assert rows["flow_p50"]["value"] <= rows["flow_p99"]["value"]
    assert rows["server_flow_batched"]["settings"]["clients"] == 16
    assert rows["loop_rate"]["value"] > 0


@pytest.mark.slow(reason="starts Ray and two trainings")
def test_bench_ray_compares_ray_with_threads(ray_installed: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "embodied.bench", "ray", "short=true"], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["ratios"]) == {"ray_over_local"}
    assert result["ratios"]["ray_over_local"] > 0
    assert {row["name"] for row in result["rows"]} == {"train_local", "train_ray"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to measure"),
        (["short=true"], "say what to measure"),
        (["simm"], "unknown benchmark 'simm'. Did you mean 'sim'?"),
        (["sim", "shrt=true"], "Did you mean 'short'?"),
        (["sim", "short=3"], "short: got 3, allowed: true or false"),
        (["sim", "out=no/such/folder/x.json"], "its directory no/such/folder does not"),
    ],
)
def test_bad_input_exits_with_2_before_anything_is_measured(words: list[str], message: str) -> None:
    outcome = run(bench.main, words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("mine")
    outcome = run(bench.main, ["sim", f"out={path}"])
    assert outcome.code == 2
    assert "exists" in outcome.stderr
    assert path.read_text() == "mine"


@pytest.mark.parametrize("original", [False, True])
def test_the_bare_engine_computes_what_the_pool_computed(original: bool) -> None:
    pool = make_pool("pick_place", {}, num_envs=4, num_threads=1)
    pool.reset(make_sampler(pool))
    replay = Replay(pool, 6, chunk=2)
    batch = Batch(pool.task.scene().compile() if original else pool.model, 4, 1)
    for _ in range(2):
        assert replay.pool_speed() > 0
        assert replay.engine_speed(batch) > 0
        np.testing.assert_allclose(batch.bind("qpos"), pool.batch.bind("qpos"), atol=1e-9)


@pytest.mark.parametrize("package", ["mjbatch", "mjbatch-uni"])
def test_the_batch_of_another_library_computes_the_same(package: str) -> None:
    """Up to the digits of the model's XML; with gravity, which the pool replaces by forces."""
    pool = make_pool("pick_place", {}, num_envs=4, num_threads=1)
    try:
        peer = PeerBatch(package, pool)
    except UserError as error:
        pytest.skip(str(error))
    pool.reset(make_sampler(pool))
    replay, batch = Replay(pool, 6, chunk=2), Batch(pool.task.scene().compile(), 4, 1)
    replay.pool_speed()
    assert min(replay.engine_speed(batch), replay.engine_speed(peer)) > 0
    size = 1 + pool.model.nq
    np.testing.assert_allclose(np.load(peer.folder / "end.npy")[:, :size], batch.state[:, :size], atol=1e-5)
    assert peer.mujoco.startswith("3.")


def test_measures_take_turns_and_ratios_are_of_the_same_round() -> None:
    calls: list[str] = []

    def measure(name: str, values: list[float]) -> float:
        calls.append(name)
        return values[sum(call == name for call in calls) - 1]

    # The machine gets four times slower after the first round that counts.
    fast, slow = [9.0, 8.0, 2.0, 2.2], [9.0, 4.0, 1.0, 1.0]
    rounds = in_turns({"a": lambda: measure("a", fast), "b": lambda: measure("b", slow)}, rounds=3)
    assert calls == ["a", "b", "b", "a"] * 2
    assert rounds == {"a": fast[1:], "b": slow[1:]}
    assert paired(rounds["a"], rounds["b"]) == 2.0


def test_bound_by_hand() -> None:
    """Alone, an env step takes 3.8 ms of collecting and 2 ms of learning. Side by side learning takes 2.5 ms, in which
    half of the collecting is done; the other half takes 1.9 ms alone."""
    alone = Costs(6e-3, collect_s=3.8e-3, learn_s=2e-3)
    assert bound(alone, Costs(5e-3, collect_s=5e-3, learn_s=2.5e-3)) == pytest.approx(1 / 4.4e-3)
    assert bound(alone, Costs(8e-3, collect_s=4e-3, learn_s=8e-3)) == pytest.approx(1 / 5e-3)  # half of learning, alone
    assert bound(alone, Costs(1.0, collect_s=1.0, learn_s=1.0)) == pytest.approx(1 / 5.8e-3)  # in alternation


def test_costs_of_a_run_are_those_after_the_warmup() -> None:
    costs = train.run(compose_run(parse_overrides(SMALL)), warmup=1, iterations=2)
    assert costs.collect_s > 0
    assert costs.learn_s > 0
    assert costs.collect_s + costs.learn_s < costs.total_s


def test_latencies_are_a_function_of_the_seed_and_have_the_mean() -> None:
    tail = Setup(0.2, workers=1, sigma=1.0)
    latencies_s = list(islice(tail.latencies_s((3, 1)), 20_000))
    assert latencies_s == list(islice(tail.latencies_s((3, 1)), 20_000))
    assert latencies_s[:5] != list(islice(tail.latencies_s((3, 2)), 5))
    assert fmean(latencies_s) == pytest.approx(0.2, rel=0.05)
    assert sum(latency_s > 4.7 * 0.2 for latency_s in latencies_s) == pytest.approx(20_000 / 50, rel=0.2)


@pytest.mark.parametrize("mode", [SYNC, ASYNC, ARRIVAL])
def test_a_run_with_slow_parts_is_a_run_and_takes_its_time(mode: Mode) -> None:
    setup = Setup(0.004, workers=2, envs=2, decisions=2, infer_s=0.002, update_s=0.02)
    found = measured(setup, mode, count(), iterations=3)
    assert found.env_steps == round((1 - found.dropped) * 3 * 2 * 2 * 2)  # batches, workers, envs, decisions
    assert found.wall_s >= 3 * 0.02  # sleeps are never shorter


@pytest.mark.slow(reason="trains a dozen times, a few iterations each")
def test_bench_async_reports_every_ratio() -> None:
    outcome = run(bench.main, ["async", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios = outcome.result["ratios"]
    assert set(ratios) >= ASYNC_RATIOS
    assert all(ratio > 0 for ratio in ratios.values())
    rows = {row["name"]: row for row in outcome.result["rows"]}
    assert rows["tail_async"]["settings"]["order"] == "arrival"
    assert rows["tail_async"]["settings"]["sigma"] == 1.0
    assert {"tail_bound", "inference_bound", "robot_bound"} <= set(rows)


def test_bench_gpu_keeps_what_its_parts_have_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the CPU. A part that is out of time, or fails, does not end the others."""
    outcome = run(bench.main, ["gpu", "short=true", "parts=threads,floors,lora,pi0", f"out={tmp_path / 'gpu.json'}"])
    assert outcome.code == 0, outcome.stderr
    names = {row["name"] for row in outcome.result["rows"]}
    assert {
        "copy_gb_s",
        "product_tflop_s",
        "pi0_bfloat16_act_1",
        "pi0_lora_update",
        "pi0_tfloat32_log_ratio_99_2",
    } <= names
    assert {"pi0_bfloat16_update_over_product", "pool_over_engine_8_threads_1"} <= set(outcome.result["ratios"])
    assert {row["settings"]["device"] for row in outcome.result["rows"]} == {"cpu"}
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert (kept["rows"], kept["ratios"]) == (outcome.result["rows"], outcome.result["ratios"])

    monkeypatch.setattr(gpu, "SHORT_LIMIT_S", 0.1)
    outcome = run(bench.main, ["gpu", "short=true", "parts=floors"])
    assert (outcome.code, outcome.result["rows"]) == (0, [])
    assert "floors did not finish: its time was over" in outcome.stderr
    for words, message in ((["parts=flors"], "Did you mean 'floors'"), ([], "device=cuda, but this build")):
        outcome = run(bench.main, ["gpu", *words])
        assert (outcome.code, outcome.stdout) == (2, "")
        assert message in outcome.stderr


def test_bench_suite_keeps_every_run_and_does_not_repeat_it(tmp_path: Path) -> None:
    words = ["suite", "short=true", f"out={tmp_path / 'suite.json'}"]
    outcome = run(bench.main, words)
    assert outcome.code == 0, outcome.stderr
    (row,) = outcome.result["rows"]
    assert (row["name"], row["unit"], row["settings"]["task"]) == ("CartPole/ours/0", "return", "gym/CartPole-v1")
    assert row["value"] == row["settings"]["eval"]["return_mean"] > 9
    assert row["settings"]["curve"]["env_steps"][-1] == row["settings"]["env_steps"] == 4096
    assert outcome.result["ratios"] == {}  # the published figures are of longer runs
    again = run(bench.main, words)
    assert (again.code, again.result["rows"]) == (0, [row])
    assert "---" not in again.stderr
    shorter = run(bench.main, ["suite", "tasks=CartPole", "seeds=[0]", "max_steps=2048", words[-1]])
    assert [r["settings"]["total_steps"] for r in shorter.result["rows"]] == [2048]
    flow = run(bench.main, ["suite", "tasks=Pendulum", "seeds=[0]", "max_steps=2048", "policy=flow", words[-1]])
    assert [r["name"] for r in flow.result["rows"]] == ["CartPole/ours/0", "Pendulum/flow/0"]

    (tmp_path / "other.json").write_text('{"what": "sim", "rows": []}')
    for bad, message in (
        ([f"out={tmp_path / 'other.json'}"], "is no result of bench suite"),
        (["tasks=CartPol"], "Did you mean 'CartPole'?"),
    ):
        outcome = run(bench.main, ["suite", *bad])
        assert (outcome.code, outcome.stdout) == (2, "")
        assert message in outcome.stderr


def test_a_return_below_zero_is_compared_the_other_way_round() -> None:
    report = Report("suite")
    for seed, value in enumerate((-80.0, -100.0, -90.0)):
        report.add(f"Acrobot/ours/{seed}", value, "return", total_steps=200_000)
    report.add("Acrobot/sb3/0", -45.0, "return", total_steps=200_000)
    suite.add_ratios(report)
    assert report.ratios["Acrobot_over_sb3"] == 0.5


def test_short_and_full_runs_have_no_common_median() -> None:
    report = Report("suite", ratios={"CartPole_over_cleanrl": 0.1, "CartPole_over_sb3": 0.1})
    for seed, value in enumerate((20.0, 30.0, 40.0)):
        report.add(f"CartPole/ours/{seed}", value, "return", total_steps=2048)
    report.add("CartPole/sb3/0", 60.0, "return", total_steps=2048)
    suite.add_ratios(report)
    assert report.ratios == {"CartPole_over_sb3": 0.5}
    report.rows[0] = {"name": "CartPole/ours/0", "value": 500.0, "unit": "return", "settings": {"total_steps": 50_000}}
    suite.add_ratios(report)
    assert report.ratios["CartPole_over_zoo"] == 1.0
    assert report.ratios["CartPole_over_sb3"] == pytest.approx(35 / 60, abs=1e-4)
