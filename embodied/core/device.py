"""Devices by name."""

import torch

from embodied.core.errors import UserError

CPU = torch.device("cpu")


def resolve_device(name: str, key: str = "device") -> torch.device:
    """Return the device of a name; auto is CUDA if there is a CUDA device. UserError for cuda without a CUDA device.

    key: option that has the name, for the message.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key}=cuda, but this machine (or this build of torch) has no CUDA device; use {key}=auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
