"""``robot=sim``: the arm of training, simulated in a process of its own (embodied.envs.mujoco.robots.robot_process).

    with SimRobot(bundle, simulation) as robot:
        robot.reset(seed=0, episode=3)
        robot.send_action({"joint1.pos": 0.1, ..., "gripper.pos": 0.04})
        observation = robot.get_observation()

It imports no simulator. The process ends with this one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from embodied.core.errors import UserError
from embodied.core.process.child import ChildProcess
from embodied.core.spec import EnvSpec
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.control.inference import Clock
from embodied.deployment.robots.base import Action, Observation, action_names

START_S = 120.0  # longest start of the process
REPLY_S = 60.0  # longest answer
FILM_S = 900.0  # longest drawing of a film: every frame is ray cast


class SimRobot(Clock):
    """A ``Robot`` in its own process, and the clock of its control loop. ConnectionError when the process has ended.

    bundle: what drives it, or the spec of an environment. simulation: ``simulation.json`` of the bundle. perturbed:
    whether the arm differs from the one of training, as its robot's file says. lockstep: time passes only by
    ``sleep_until``, so that a run is exact and as fast as the machine allows; otherwise it is real. Either way the
    physics is at the step nearest to the clock, so that a command takes effect there.
    """

    def __init__(
        self, bundle: Bundle | EnvSpec, simulation: Mapping[str, Any], perturbed: bool = False, lockstep: bool = False
    ) -> None:
        self.arms, self.cameras = bundle.arms, bundle.cameras
        self.name, self.lockstep = f"{bundle.robot} (simulated)", lockstep
        self._options = {
            "task": simulation["task"], "cameras": [asdict(camera) for camera in self.cameras], "perturbed": perturbed,
            "lockstep": lockstep,
        }  # fmt: skip
        self._process: ChildProcess | None = None
        self._observed: list[str] = []
        self._time_s = 0.0

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    @property
    def observation_features(self) -> dict[str, Any]:
        cameras = {camera.name: (camera.height, camera.width, 3) for camera in self.cameras}
        return dict.fromkeys(self._observed, float) | cameras

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(action_names(self.arms), float)

    @property
    def is_connected(self) -> bool:
        return self._process is not None and self._process.is_alive

    def connect(self) -> None:
        """Start the process and wait until it is ready. UserError if it refuses its options."""
        module = "embodied.envs.mujoco.robots.robot_process"
        self._process = ChildProcess(module, json.dumps(self._options), name="the simulated robot")
        try:
            self._process.receive(START_S)
        except ConnectionError as error:
            self.disconnect()
            raise UserError(str(error)) from error
        self._observed = list(self._call("observe"))

    def get_observation(self) -> Observation:
        """Return the newest measurements; with cameras, also their images."""
        found: Observation = self._call("observe", bool(self.cameras))
        return found

    def send_action(self, action: Action) -> Action:
        self._call("act", dict(action))
        return dict(action)

    def disconnect(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None

    def reset(self, seed: int, episode: int) -> str:
        """Begin an episode of ``embodied.eval`` with this seed; return its instruction."""
        self._time_s = 0.0
        return str(self._call("reset", seed, episode))

    def success(self) -> bool:
        return bool(self._call("success"))

    def frames(self) -> NDArray[np.uint8]:
        """Return the film of the episode, ten frames per second, uint8 [F, h, w, 3]. It takes a minute or more."""
        found: NDArray[np.uint8] = self._call("frames", limit_s=FILM_S)
        return found

    def now(self) -> float:
        """Return the time: since the reset in lock-step, otherwise the machine's."""
        return self._time_s if self.lockstep else super().now()

    def sleep_until(self, time_s: float) -> None:
        if not self.lockstep:
            super().sleep_until(time_s)
        elif time_s > self._time_s:
            self._call("advance", time_s)
            self._time_s = time_s

    def _call(self, method: str, *arguments: Any, limit_s: float = REPLY_S) -> Any:
        """Call a method of the process. UserError for a call that it refused, ConnectionError if it is gone."""
        if self._process is None:
            raise ConnectionError("the simulated robot is not connected: call connect()")
        try:
            return self._process.call(method, *arguments, limit_s=limit_s)
        except UserError as error:
            raise UserError(f"the simulated robot refused: {error}") from None
