"""Torch tensors over the live arrays of ``mujoco.batch.Batch``: no copies, current after every step."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor


def readonly(array: np.ndarray) -> Tensor:
    """Return a tensor over an output array of the engine. Tasks must not write to it (torch cannot enforce that)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
