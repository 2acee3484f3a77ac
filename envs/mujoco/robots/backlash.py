"""Backlash of a gear."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def backlash(output: Array, value: Array, width: Array | float) -> Array:
    """Return the next output of the hysteresis operator "play" (Krasnosel'skii and Pokrovskii 1989).

    The output follows the input ``value`` when it is half the ``width`` ahead, and stands still otherwise.
    """
    return output.clip(value - width / 2, value + width / 2)
