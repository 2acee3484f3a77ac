"""The parts of a run as the loop uses them, wherever they live: in this process, or as actors of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from embodied.core.policy import Policy
from embodied.runtime.watch.meter import Counted
from embodied.runtime.watch.track import Track


class WorkerPart(Counted, Protocol):
    """An env worker."""

    @property
    def resumes_exactly(self) -> bool:
        """Whether all its envs can be restored from a checkpoint."""
        ...

    @property
    def incarnation(self) -> int:
        """How often it was replaced."""
        ...

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None: ...

    def load_state_dict(self, group: int, state: Mapping[str, Any] | None) -> None:
        """Continue one group from its state; None: the checkpoint has none."""
        ...


class LearnerPart(Counted, Protocol):
    """The learner."""

    track: Track
    """What the learner's thread does."""

    @property
    def iteration(self) -> int:
        """Batches consumed, which is also the version of the weights."""
        ...

    @property
    def env_steps(self) -> int:
        """Control steps consumed."""
        ...

    @property
    def version(self) -> int:
        """Version of the newest published weights; -1 if there are none."""
        ...

    @property
    def deployed(self) -> Policy:
        """The policy to evaluate and to keep."""
        ...

    def deployed_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights to evaluate and to keep, on the CPU."""
        ...

    def publish(self) -> None:
        """Publish the present weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with keys policy, algorithm and counters."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. UserError for a policy of another architecture."""
        ...
