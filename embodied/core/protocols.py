"""Interfaces of environments, policies and algorithms: all that the runtime and the trainers call on them.

``VecEnv``, ``Policy`` and ``Algorithm`` are needed to train. The other protocols are capabilities, each optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from embodied.core.env import VecEnv as VecEnv
from embodied.core.policy import Policy as Policy
from embodied.core.process_group import ProcessGroup
from embodied.core.types import Fragment

Metrics = dict[str, float]
"""Values of one update by the name under which they are logged."""


# -- algorithms --------------------------------------------------------------------------------------------------------
@runtime_checkable
class Algorithm(Protocol):
    """Reinforcement learning on fragments. Owns the policy's optimiser."""

    policy: Policy
    """Policy being trained; the actors get its weights."""
    deployed: Policy
    """Policy that is evaluated and kept: ``policy`` itself or an average of its weights over updates."""

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        """Train on one batch; ``version`` counts the batches consumed before it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain numbers: optimiser, schedules, random generators.

        The weights of ``policy`` are in it unless ``policy`` is ``deployed``.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from what ``state_dict`` returned."""
        ...


@runtime_checkable
class SharedUpdate(Protocol):
    """An algorithm whose updates several learner processes can make together."""

    learners: ProcessGroup
    """The processes; ``SINGLE_PROCESS`` until the runtime sets it. Each then calls ``update`` with its own fragments of
    the batch, at least one. All must end with the same weights and metrics, bit for bit."""
