"""Devices by name, copies on the CPU, and its cores."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from embodied.core.errors import UserError, one_line

CPU = torch.device("cpu")
T = TypeVar("T")


def means_cuda(name: str) -> bool:
    """Return whether a name stands for a CUDA device on this machine, which need not have the device."""
    return name.startswith("cuda") or (name == "auto" and torch.cuda.is_available())


def resolve_device(name: str, key: str = "device") -> torch.device:
    """Return the device of a name: auto, cpu, cuda or cuda:<index>. A CUDA device always has its index.

    auto is the first CUDA device if there is one; so is cuda. UserError for a CUDA device that this machine lacks. key:
    option that has the name, for the message.
    """
    if not means_cuda(name):
        return CPU
    if not torch.cuda.is_available():
        raise UserError(f"{key}={name}, but {_what_is_missing()}; use {key}=auto")
    index, num = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= num:
        allowed = ", ".join(f"cuda:{i}" for i in range(num))
        raise UserError(f"{key}: got {name}, allowed on this machine: auto, cpu, {allowed}")
    return torch.device("cuda", index)


def _what_is_missing() -> str:
    """Return why torch has no CUDA device: the build, the driver or the card."""
    if torch.version.cuda is None:
        return "this build of torch is without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # names the driver's version if it is too old
        return one_line(error)
    return "this machine has no CUDA device"


def copied_to_cpu(state: T) -> T:
    """Return a copy of nested dicts and lists whose tensors are on the CPU."""
    copied: Any = state
    if isinstance(state, Mapping):
        copied = {key: copied_to_cpu(value) for key, value in state.items()}
    elif isinstance(state, list):
        copied = [copied_to_cpu(value) for value in state]
    elif isinstance(state, Tensor):
        copied = state.detach().to(CPU, copy=True)
    return cast("T", copied)


def available_cores() -> int:
    """Return the number of cores that this process may use: by affinity and by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
