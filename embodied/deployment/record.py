"""The record of an episode on a robot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class EpisodeRecord:
    """What happened in an episode; lists have an entry per control step."""

    instruction: str = ""
    """What was to be done; empty if the task has no words."""
    reason: str = ""
    """Why it ended: ``time limit``, ``stopped``, ``refused`` or an error."""
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
    times_s: list[float] = field(default_factory=list)
    """Time since the beginning."""
    states: list[NDArray[np.float32]] = field(default_factory=list)
    """State [S], physical units."""
    images: list[dict[str, NDArray[np.uint8]]] = field(default_factory=list)
    """Images by camera."""
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    """Action [A], physical units."""
    targets: list[Array] = field(default_factory=list)
    """Joint targets that left for the robot, [J]."""
    qpos: list[Array] = field(default_factory=list)
    """Measured joint positions, [J]."""

    @property
    def tracking_error(self) -> Array:
        """Distance of the measured position from the target of the step before, [steps - 1, J]."""
        if len(self.qpos) < 2:
            return np.zeros((0, 0))
        return np.abs(np.stack(self.qpos[1:]) - np.stack(self.targets[:-1]))

    @property
    def rate_hz(self) -> float:
        """Achieved rate of the ticks; the last one begins at the end of the record."""
        return (self.ticks - 1) / self.duration_s if self.duration_s > 0 else 0.0
