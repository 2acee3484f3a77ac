"""Devices by name. There is no GPU where these tests run, so torch is told that there are two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.device import resolve_device
from embodied.core.errors import UserError
from embodied.envs.mujoco.family import MujocoFamily
from embodied.runtime import LocalConfig, RayConfig
from embodied.session.config import compose_run, resolve, to_mapping
from embodied.session.factories import make_env


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_gpu_always_has_its_index(two_gpus: None) -> None:
    """Warp and streams need it."""
    names = ["auto", "cpu", "cuda", "cuda:0", "cuda:1"]
    expected = [torch.device(name) for name in ("cuda:0", "cpu", "cuda:0", "cuda:0", "cuda:1")]
    assert [resolve_device(name) for name in names] == expected
    with pytest.raises(UserError, match=r"sim\.device: got cuda:2, allowed on this machine: auto, cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2", "sim.device")


def test_without_a_gpu_the_cpu_is_used_or_the_device_is_refused() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f"device={name}, but this machine"):
            resolve_device(name)


def test_a_simulator_gets_the_learners_device(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def make(self: MujocoFamily, id: str, task: Any, *, sim: Any, **options: Any) -> Any:
        built.append(sim.device)
        raise UserError("built")

    monkeypatch.setattr(MujocoFamily, "make", make)
    for device in ("auto", "cuda:1"):
        with pytest.raises(UserError, match="built"):
            make_env(compose_run({"task": "reach", "sim": "warp", "device": device}), 2, 1)
    assert built == ["cuda:0", "cuda:1"]


def test_only_devices_are_names_of_one() -> None:
    for name in ("gpu", "cuda:", "cuda:a", "mps"):
        with pytest.raises(UserError, match=f"device: got '{name}', allowed: 'auto', 'cpu', 'cuda' or 'cuda:<index>'"):
            LocalConfig(device=name)
    with pytest.raises(UserError, match="device: got cuda:1, allowed with runtime=ray: auto, cpu, cuda"):
        RayConfig(device="cuda:1")


def test_the_configuration_of_a_run_on_a_gpu_is_read_without_one() -> None:
    config = compose_run({"task": "reach", "algo": "grpo", "policy": "gaussian", "num_envs": 32})
    there = to_mapping(config)
    there["runtime"]["device"] = "cuda"
    assert resolve(there).runtime.device == "cuda"
