"""If simulator and learner have one device, observations, actions and chains stay on it.

There is no GPU where these tests run, so the device is one that is none (``tests.runtime.other_device``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.builders import NUM_ENVS

CASES = [("gaussian", "sync", 0), ("flow", "sync", 0), ("gaussian", "local", 0), ("gaussian", "local", 1)]
"""Policy, runtime and max_staleness of trainings."""


@pytest.fixture(scope="module")
def trainings(root: Path) -> list[dict[str, Any]]:
    """Return what was found in the trainings."""
    command = [sys.executable, "-m", "tests.runtime.resident", *(",".join(map(str, case)) for case in CASES)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_policy_reads_and_writes_never_leaves_the_device(
    trainings: list[dict[str, Any]], case: tuple[str, str, int]
) -> None:
    found = trainings[CASES.index(case)]
    stay = {"obs", "last_obs", "final_obs", "chain", "action"}
    assert {tuple(place) for place in found["places"]} == {(name, "other") for name in stay} | {
        ("value", "cpu"),
        ("reward", "cpu"),
    }
    to_cpu = [tuple(transfer["shape"]) for transfer in found["transfers"] if transfer["to"] == "cpu"]
    assert len(to_cpu) > 100
    larger = {shape for shape in to_cpu if len(shape) > 1}
    assert larger == {(NUM_ENVS // 2, 2)}, "rewards of the two actions of each env in a group"
    if case[2] == 0:
        assert found["difference"] < 1e-5
    there, here = found["evaluations"]
    assert there.pop("return_mean") == pytest.approx(here.pop("return_mean"), abs=1e-3)
    assert there == here, "the episodes of an evaluation do not depend on the device"


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a build of torch for it")


@pytest.mark.slow(reason="every operation on the device goes through Python")
@pytest.mark.parametrize("device", [[], pytest.param(["cuda:0"], marks=gpu)])
def test_every_policy_and_algorithm_computes_there_what_it_computes_on_the_cpu(root: Path, device: list[str]) -> None:
    """It acts, plans, evaluates and learns, with states on the CPU and fragments from there."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.on_device", *device]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 35
    assert {name: error for name, error in found.items() if isinstance(error, str) or error > 1e-4} == {}
