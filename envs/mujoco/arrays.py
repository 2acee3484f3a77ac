"""Torch tensors over the live arrays of a batch of simulations: no copies, current after every step."""

import warnings
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Simulations(Protocol):
    """N simulations of one model: ``mujoco.batch.Batch`` on the CPU, or ``WarpBatch`` on any device."""

    model: Any
    """The model, ``mujoco.MjModel``."""

    def bind(self, name: str) -> Any:
        """Return the live array of a field of ``mujoco.MjData``, [N, ...]: of NumPy or of torch."""
        ...

    def expand(self, name: str) -> Any:
        """Return the live array of a field of the model, [N, ...]; from now on each simulation has its own values.

        UserError if simulations cannot have values of their own.
        """
        ...


def live(array: np.ndarray | Tensor) -> Tensor:
    """Return a tensor over a live array. Tasks must not write to output arrays (torch cannot enforce that)."""
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
