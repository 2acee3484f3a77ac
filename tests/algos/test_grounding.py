"""Grounding: when it begins to train positions, and which options it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.algos.supervised import Grounding, GroundingConfig
from embodied.core.errors import UserError
from tests.policies.vla_builders import build


def grounding(**options: Any) -> Grounding:
    return Grounding(build(), GroundingConfig(updates=10, **options), seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize(("masks_only", "first"), [(0.0, 0), (0.3, 3), (0.35, 4), (1.0, 10)])
def test_positions_are_trained_from_a_share_of_the_updates_on(masks_only: float, first: int) -> None:
    algorithm = grounding(masks_only=masks_only)
    trained = []
    for algorithm.updates in range(11):
        trained.append(algorithm.trains_positions)
    assert trained == [update >= first for update in range(11)]


@pytest.mark.parametrize("options", [{"masks_only": -0.1}, {"masks_only": 1.1}, {"reuse": 0.5}])
def test_options_have_bounds(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        grounding(**options)
