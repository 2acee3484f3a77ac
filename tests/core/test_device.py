"""Devices by name. There is no GPU where these tests run, so torch is told that there are two."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied.core import device as devices
from embodied.core.device import CPU, available_cores, resolve_device
from embodied.core.errors import UserError
from embodied.envs.adapters.config import GymSimConfig, ManiSkillConfig
from embodied.envs.adapters.gym import family as gym
from embodied.envs.adapters.maniskill import family as maniskill
from embodied.envs.registry import MujocoFamily
from embodied.envs.views import envpool
from embodied.runtime.config import LocalConfig
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.recipe import device_of
from embodied.session.config import compose_run, resolve, to_mapping, with_device
from embodied.session.factories import acting_device, make_env, settled


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
        with pytest.raises(UserError, match=f"device={name}, but this build of torch is without CUDA; use device=auto"):
            resolve_device(name)


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r"device=cuda, but The NVIDIA driver .* too old .found version 11040.* Please"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(UserError, match="device=cuda, but this machine has no CUDA device"):
        resolve_device("cuda")


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


def test_a_run_keeps_what_auto_meant_and_reads_the_same_elsewhere(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two env groups, because the actor had a GPU, a machine without one also makes two."""
    words = {"task": "reach", "algo": "grpo", "policy": "gaussian", "num_envs": 32, "max_staleness": 1}
    there = settled(compose_run(words))
    assert (there.runtime.device, there.runtime.groups_per_worker) == ("cuda:0", 2)
    assert settled(compose_run(words | {"sim": "warp"})).runtime.groups_per_worker == 1, "all envs on the GPU at once"
    on_ray = settled(compose_run(words | {"runtime": "ray"}))
    assert (on_ray.runtime.device, on_ray.runtime.groups_per_worker) == ("cuda", 2)
    assert settled(compose_run(words | {"runtime": "ray", "sim": "warp"})).runtime.groups_per_worker == 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("reading a run asks for no device"))
    here = resolve(to_mapping(there))
    assert here == there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cuda:0, but this build"):
        settled(here)
    there_on_cpu = settled(resolve(to_mapping(there) | {"runtime": to_mapping(there)["runtime"] | {"device": "cpu"}}))
    assert (there_on_cpu.runtime.device, there_on_cpu.runtime.groups_per_worker) == ("cpu", 2)
    assert acting_device(with_device(here, "auto")) == acting_device(with_device(on_ray, "auto")) == CPU
    assert with_device(on_ray, "cuda:1").runtime.device == "cuda:1", "refused for parts on Ray, not in this process"


def test_parts_on_ray_may_have_a_gpu_that_this_process_lacks() -> None:
    config = RayConfig(device="cuda")
    assert device_of(config) == torch.device("cuda")
    kinds = ("learner", "actor_server", "env_worker")
    assert [config.resources_of(kind, True).get("GPU") for kind in kinds] == [0.5, 0.5, None]
    assert sum(config.resources_of(kind, True, True)["GPU"] for kind in kinds) <= 1
    assert [config.resources_of(kind, False, True).get("GPU") for kind in kinds] == [None] * 3
    assert acting_device(compose_run({"task": "reach", "runtime": "ray", "device": "cuda"})) == CPU


def test_simulators_start_no_more_than_the_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight cores, its quota allows this process two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(devices, "open", lambda *_, **__: io.StringIO("200000 100000\n"), raising=False)
    assert available_cores() == 2

    slow = replace(gym.probe("tests.envs.toy_gym:Toy-v0", {}, None), step_s=1e-2)
    assert gym._processes(slow, 0, GymSimConfig()) == 2

    monkeypatch.setattr(maniskill.ManiSkill, "spec", lambda *_: None)
    monkeypatch.setattr(maniskill, "ManiSkillProcesses", lambda *given: given[-1])
    task = maniskill.ManiSkillTaskConfig()
    assert maniskill.ManiSkill().make("PickCube-v1", task, num_envs=4, num_threads=0, sim=ManiSkillConfig()) == 2

    threads: list[int] = []
    monkeypatch.setattr(envpool, "open_task", lambda *_, num_threads, **__: threads.append(num_threads))
    monkeypatch.setattr(envpool, "EnvPoolView", lambda *_: None)
    envpool.make("reach", 4, batch_size=2)
    assert threads == [1, 1]
