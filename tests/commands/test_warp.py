"""Runs on MuJoCo Warp: trained, resumed, evaluated in both simulators; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied.envs.mujoco.warp.batch import INSTALL
from tests.commands.helpers import SMALL, run_eval, run_train


@pytest.mark.slow(reason="compiles kernels for a minute unless they are in Warp's cache")
def test_a_run_trains_resumes_and_is_evaluated_in_both_simulators(tmp_path: Path) -> None:
    pytest.importorskip("mujoco_warp", reason=INSTALL)
    run, straight = tmp_path / "run", tmp_path / "straight"
    words = [*SMALL, "sim=warp", "seed=3", "randomization=sim2real"]
    first = run_train(*words, "total_steps=640", f"out={run}")
    assert first.code == 0, first.stderr
    assert "name: warp" in (run / "config.yaml").read_text()
    assert first.result["eval"]["episodes"] == 4
    resumed = run_train(f"resume={run}", "total_steps=1280")
    assert resumed.code == 0, resumed.stderr
    assert run_train(*words, "total_steps=1280", f"out={straight}").code == 0
    curves = [[json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in (run, straight)]
    losses, expected = ([row["train/value_loss"] for row in curve] for curve in curves)
    assert losses == expected
    evaluated = [f"run={run}", "episodes=4", "randomization=none"]
    results = {sim: run_eval(*evaluated, f"sim={sim}").result for sim in ("warp", "mujoco")}
    assert {sim: result["sim"] for sim, result in results.items()} == {"warp": "warp", "mujoco": "mujoco"}
    assert results["warp"]["return_mean"] == pytest.approx(results["mujoco"]["return_mean"], abs=1e-3)
    as_trained = run_eval(*evaluated[:2], "sim=mujoco").result  # another simulator keeps the run's randomisation
    assert as_trained["return_mean"] != pytest.approx(results["mujoco"]["return_mean"], abs=0.02)


@pytest.mark.slow(reason="compiles kernels for a minute unless they are in Warp's cache")
def test_a_policy_trains_on_images_of_the_device(tmp_path: Path) -> None:
    pytest.importorskip("mujoco_warp", reason=INSTALL)
    run = tmp_path / "run"
    pixels = ["policy.cameras=[front,wrist]", "policy.image_size=36"]
    trained = run_train(*SMALL, *pixels, "sim=warp", "total_steps=64", f"out={run}")
    assert trained.code == 0, trained.stderr
    results = [run_eval(f"run={run}", "episodes=4", f"sim={sim}").result for sim in ("warp", "mujoco")]
    assert results[0]["return_mean"] == pytest.approx(results[1]["return_mean"], abs=1e-2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["+sim.randomization.odd={field: geom_adhesion, names: [arm], range: [0, 1]}"],
            "sim.randomization.odd: sim=warp: geom_adhesion cannot differ between envs, allowed with sim=mujoco",
        ),
        (["task=gym/CartPole-v1"], "sim=warp does not run task=gym/CartPole-v1: it needs gym"),
    ],
)
def test_what_does_not_fit_is_refused_before_writing(words: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    outcome = run_train("task=reach", "policy=gaussian", "sim=warp", *words, "device=cpu", f"out={out}")
    assert outcome.code == 2
    assert message in outcome.stderr
    assert not out.exists()
