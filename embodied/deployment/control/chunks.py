"""The chunks of one episode: requested from an observation, handed to the schedule when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.inference import Inference
from embodied.deployment.control.observation import Measurement
from embodied.deployment.control.schedule import PlanRequest, Schedule


@dataclass(frozen=True, slots=True)
class StepStart:
    """Measurements at the start of a control step, from which its action is planned."""

    step: int
    """Number of the control step."""
    measured: Measurement
    """What the robot measured."""
    state: NDArray[np.float32]
    """What the policy sees of it, [S]."""
    finger_m: float
    """Finger target of the step before."""


class Chunks:
    """Inference and schedule of one episode. instruction: its index. seed: of the noise, if it is ``seeded``."""

    def __init__(
        self, bundle: Bundle, inference: Inference, schedule: Schedule, instruction: int, noise: str, seed: int
    ) -> None:
        self.bundle, self.inference, self.schedule = bundle, inference, schedule
        self.instruction, self.noise = instruction, noise
        self.random = np.random.Generator(np.random.Philox(key=seed))
        self.waited_s = 0.0
        """Time by which control steps began later because the robot waited for their chunks."""

    def action(self, start: StepStart, until_s: float) -> NDArray[np.float32] | None:
        """Return the action of a control step; None if the robot has to wait for its chunk beyond ``until_s``."""
        self.arrive()
        self.request(start)
        if self.schedule.pending and self.schedule.waits:
            began_s = self.inference.clock.now()
            if not self.arrive(until_s - began_s):
                return None
            self.waited_s += self.inference.clock.now() - began_s
        return self.schedule.action(start.step)

    def request(self, start: StepStart) -> None:
        """Plan from the observation of a control step, if a chunk is due."""
        request = self.schedule.request(start.step, self.inference.clock.now() - start.measured.time_s)
        if request is not None:
            self.inference.submit(self._inputs(request, start))
            self.arrive()

    def arrive(self, wait_s: float = 0.0) -> bool:
        """Hand the pending chunk to the schedule if it arrives within ``wait_s``; return whether it did."""
        found = self.inference.take(max(0.0, wait_s))
        if found is not None:
            self.schedule.arrive(*found)
        return found is not None

    def _inputs(self, request: PlanRequest, start: StepStart) -> dict[str, NDArray[Any]]:
        """Return the inputs of the planner, one row."""
        bundle, shape = self.bundle, self.bundle.noise_shape
        seeded = self.noise == "seeded"
        noise = self.random.standard_normal(shape, np.float32) if seeded else np.zeros(shape, np.float32)
        inputs: dict[str, NDArray[Any]] = {"state": start.state, "noise": noise}
        for camera in bundle.cameras:
            if camera.name not in start.measured.observation:
                raise UserError(f"the robot's observation lacks the image of camera '{camera.name}'")
            inputs[f"images.{camera.name}"] = np.asarray(start.measured.observation[camera.name])
        if bundle.cameras and bundle.instructions:
            inputs["instruction"] = np.array(self.instruction, np.int64)
        if bundle.max_delay:
            inputs |= {"prefix": request.prefix_DA, "delay": np.array(request.delay, np.int64)}
        return {name: value[None] for name, value in inputs.items()}
