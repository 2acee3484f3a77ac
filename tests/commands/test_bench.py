"""The bench command: its result, its ratios, and that what it compares is the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mujoco.batch import Batch

from embodied import bench
from embodied.benchmarks import adapters, train, vla
from embodied.benchmarks.measure import Report, in_turns, paired
from embodied.benchmarks.sim import Replay
from embodied.benchmarks.train import Bound, Costs, Shared
from embodied.envs import make_pool, make_sampler
from tests.commands.helpers import SMALL, run

SIM_RATIOS = {
    "pool_over_engine_1024", "pool_flatness_256_8192", "pool_over_envpool", "pool_over_async_vector_env", "rss_gb_4096",
    "envpool_adapter_over_bare", "gym_adapter_over_bare", "gym_light_adapter_over_bare", "maniskill_adapter_over_bare",
    "warp_pool_over_engine", "envpool_adapter_over_paused", "gym_light_1024_adapter_over_bare",
    "envpool_1024_adapter_over_bare", "envpool_1024_adapter_over_paused",
}  # fmt: skip
OF_OTHERS = {name for name in SIM_RATIOS if any(other in name for other in ("envpool", "maniskill", "warp"))}


@pytest.mark.slow(reason="starts processes for AsyncVectorEnv and for the memory of a pool")
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
    adapters.compare(report, "gym", "CartPole-v1", no_display, 2, 1, 2, 4, "gym_light")
    adapters.compare(report, "gym", "NoSuchTask-v1", no_display, 2, 1, 2, 4)
    assert report.ratios == {}
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "gym_light is left out: RuntimeError: no Vulkan device"
    assert said[1].startswith("gym is left out: UserError: ")


@pytest.mark.slow(reason="trains six times, a few steps each")
def test_bench_train_reports_the_bound_and_how_it_was_measured() -> None:
    outcome = run(bench.main, ["train", "short=true"])
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    assert set(result["ratios"]) == {"train_over_bound", "local_over_sync"}
    rows = {row["name"]: row for row in result["rows"]}
    assert {f"{part}_alone_{how}" for part in train.PARTS for how in ("one_thread", "all_cores")} <= set(rows)
    assert rows["bound"]["settings"]["definition"]
    assert rows["train_local"]["settings"]["task"] == "pick_place"
    assert rows["train_local"]["settings"]["policy"] == "flow"
    assert rows["train_one_thread"]["settings"]["sim_threads"] == 1
    assert {"collect_side_by_side", "learn_side_by_side", "bound_independent_cores"} <= set(rows)
    assert len(rows["train_local"]["settings"]["of_rounds"]) == 2


@pytest.mark.slow(reason="exports two policies, starts a simulated arm and two servers")
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


def test_bench_flow_reports_its_ratios() -> None:
    outcome = run(bench.main, ["flow", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios = outcome.result["ratios"]
    assert set(ratios) == {"sde_one_step_over_full_chain", "sample_over_bare_forward"}
    assert all(value > 0 for value in ratios.values())
    rows = {row["name"] for row in outcome.result["rows"]}
    assert {"expert_update_one_over_all", "default_likelihood_one_over_all"} <= rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to measure"),
        (["short=true"], "say what to measure"),
        (["simm"], "unknown benchmark 'simm'. Did you mean 'sim'?"),
        (["sim", "shrt=true"], "Did you mean 'short'?"),
        (["sim", "short=3"], "short: got 3, allowed: true or false"),
        (["sim", "out=no/such/folder/x.json"], "no directory no/such/folder"),
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


@pytest.mark.parametrize("persistent", [False, True])
def test_the_bare_engine_computes_what_the_pool_computed(persistent: bool) -> None:
    pool = make_pool("pick_place", {}, num_envs=4, num_threads=1)
    pool.reset(make_sampler(pool))
    replay = Replay(pool, 6, chunk=2)
    batch = Batch(pool.model, 4, 1, persistent=persistent)
    for _ in range(2):
        assert replay.pool_speed() > 0
        assert replay.engine_speed(batch) > 0
        np.testing.assert_allclose(batch.bind("qpos"), pool.batch.bind("qpos"), atol=1e-9)


def test_measures_take_turns_and_ratios_are_of_the_same_round() -> None:
    calls: list[str] = []

    def measure(name: str, values: list[float]) -> float:
        calls.append(name)
        return values[sum(call == name for call in calls) - 1]

    # The machine gets four times slower after the first round that counts.
    fast, slow = [9.0, 8.0, 2.0, 2.2], [9.0, 4.0, 1.0, 1.0]
    rounds = in_turns({"a": lambda: measure("a", fast), "b": lambda: measure("b", slow)}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert rounds == {"a": fast[1:], "b": slow[1:]}
    assert paired(rounds["a"], rounds["b"]) == 2.0


def test_bound_by_hand() -> None:
    """1,000 env steps; one thread needs 6 + 1 + 3 s; two threads do the parts in 3.2 + 0.6 + 2 s. Side by side learning
    takes 2.5 s, in which half of the collecting is done; the other half takes 1.9 s alone."""
    one = Costs(1000, 10.5, {"sim": 6.0, "infer": 1.0, "learn": 3.0})
    two = Costs(1000, 6.0, {"sim": 3.2, "infer": 0.6, "learn": 2.0})
    bound = Bound.of(one, two, Shared(collect_s=5e-3, learn_s=2.5e-3), cores=2)
    assert bound.overlapped_s == pytest.approx(4.4e-3)
    assert bound.alternating_s == pytest.approx(5.8e-3)
    assert bound.independent_cores_s == pytest.approx(5.0e-3)  # 10 s of work on 2 cores
    assert bound.speed == pytest.approx(1 / 4.4e-3)
    slow_learner = Bound.of(one, two, Shared(collect_s=4e-3, learn_s=8e-3), cores=8)
    assert slow_learner.overlapped_s == pytest.approx(4e-3 + 1e-3)  # the other half of learning, alone
    assert slow_learner.independent_cores_s == pytest.approx(3.2e-3)  # the simulator alone takes that long
    assert Bound.of(one, two, Shared(1.0, 1.0), cores=2).speed == pytest.approx(1 / 5.8e-3)


def test_costs_of_a_run_are_those_after_the_warmup() -> None:
    words = dict(word.split("=", 1) for word in SMALL if "hidden" not in word and not word.startswith("eval"))
    overrides = {key: int(value) if value.isdigit() else value for key, value in words.items()}
    costs = train.run(overrides, train.Sizes(warmup=1, iterations=2, rounds=1))
    assert costs.env_steps == 2 * 8 * 8  # iterations x envs x decisions of one step
    assert all(busy > 0 for busy in costs.busy_s.values())
    assert sum(costs.busy_s.values()) < costs.wall_s


@pytest.mark.slow(reason="starts processes for every OpenGL backend")
def test_bench_camera_reports_ratios_of_the_backends_that_are_there() -> None:
    outcome = run(bench.main, ["camera", "short=true"])
    assert outcome.code == 0, outcome.stderr
    ratios, rows = outcome.result["ratios"], {row["name"]: row for row in outcome.result["rows"]}
    for backend in ("egl", "osmesa"):
        assert (f"raycast_over_{backend}" in ratios) == (f"MUJOCO_GL={backend}: left out" not in outcome.stderr)
    assert all(value > 0 for value in ratios.values())
    assert {"raycast_front_64", "raycast_front_64_every_ray", "raycast_wrist_64", "raycast_front_128"} <= set(rows)
    assert rows["raycast_front_64_cpu"]["unit"] == "us/image"


def test_vla_measures_its_economies() -> None:
    report = vla.measure(short=True)
    assert {"infer_over_sample_actions", "learner_cached_over_recompute"} == set(report.ratios)
    rows = {row.name: row.value for row in report.rows}
    assert rows["image_bytes"] == 2 * 64 * 64 * 3, "images travel as uint8"
    assert rows["prefix_bytes"] > 4 * 2 * 4 * 32 * 32  # floats: key and value, layers, image tokens, size of a head
    assert all(value > 0 for value in rows.values())
