"""Quantities of an observation that follow from others. numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embodied.core.spec import Term

Array = NDArray[np.float64]


def difference(term: Term, parts: Mapping[str, Array]) -> Array:
    """Return a term with a ``difference``, [..., size]: ``of + offset - minus``, with zeros for missing entries.

    parts: quantities by name, [..., size].
    """
    rule = term.difference
    assert rule is not None
    of, minus = parts[rule.of], parts[rule.minus]
    total = np.zeros((*of.shape[:-1], max(term.size, 3)))
    for sign, piece in ((1.0, of), (1.0, np.array(rule.offset)), (-1.0, minus)):
        size = min(piece.shape[-1], total.shape[-1])
        total[..., :size] += sign * piece[..., :size]
    return total[..., : term.size]
