"""The record of an episode on a robot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Step:
    """One control step whose first command has left for the robot."""

    time_s: float
    """Time since the beginning of the episode."""
    state: NDArray[np.float32]
    """State [S], physical units."""
    images: dict[str, NDArray[np.uint8]]
    """Images by camera."""
    action: NDArray[np.float32]
    """Action [A], physical units."""
    qpos: Array
    """Measured joint positions, [J]."""
    target: Array
    """Joint targets that left for the robot last, [J]."""


@dataclass
class EpisodeRecord:
    """What happened in an episode."""

    instruction: str = ""
    """What was to be done; empty if the task has no words."""
    reason: str = ""
    """Why it ended: ``time limit``, ``stopped``, ``refused``, ``interrupted`` or an error."""
    success: bool | None = None
    """Whether the task was solved at the end; None if nobody said so."""
    duration_s: float = 0.0
    """Length on the loop's clock."""
    ticks: int = 0
    """Ticks that were carried out."""
    missed_deadlines: int = 0
    """Ticks that were dropped."""
    waited_ticks: int = 0
    """Ticks in which the robot held its targets because no chunk had arrived."""
    padded_steps: int = 0
    """Control steps for which no chunk had an action."""
    beyond_max_delay: int = 0
    """Chunks that took longer than the policy was trained for."""
    latencies_s: list[float] = field(default_factory=list)
    """Latency of each inference."""
    interventions: dict[str, int] = field(default_factory=dict)
    """Interventions of the safety, by kind."""
    steps: list[Step] = field(default_factory=list)
    """Control steps, each appended at once, so that an episode may end at any moment."""

    @property
    def times_s(self) -> list[float]:
        """Time of each step since the beginning."""
        return [step.time_s for step in self.steps]

    @property
    def states(self) -> list[NDArray[np.float32]]:
        """State [S] of each step, physical units."""
        return [step.state for step in self.steps]

    @property
    def images(self) -> list[dict[str, NDArray[np.uint8]]]:
        """Images of each step, by camera."""
        return [step.images for step in self.steps]

    @property
    def actions(self) -> list[NDArray[np.float32]]:
        """Action [A] of each step, physical units."""
        return [step.action for step in self.steps]

    @property
    def targets(self) -> list[Array]:
        """Joint targets [J] of each step."""
        return [step.target for step in self.steps]

    @property
    def qpos(self) -> list[Array]:
        """Measured joint positions [J] of each step."""
        return [step.qpos for step in self.steps]

    @property
    def tracking_error(self) -> Array:
        """Distance of the measured position from the target of the step before, [steps - 1, J]."""
        if len(self.steps) < 2:
            return np.zeros((0, 0))
        return np.abs(np.stack(self.qpos[1:]) - np.stack(self.targets[:-1]))

    @property
    def rate_hz(self) -> float:
        """Achieved rate of the ticks; the last one begins at the end of the record."""
        return max(0, self.ticks - 1) / self.duration_s if self.duration_s > 0 else 0.0
