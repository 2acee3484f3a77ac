"""Simulated arms as robots of LeRobot: ``lerobot-record --robot.type=embodied --robot.task=lift ...``

    LeRobot ── degrees, 0 to 100 ──► EmbodiedRobot ── rad, m ──► SimRobot: the simulation, in a process of its own

Keys are LeRobot's (``shoulder_pan.pos``, ``gripper.pos``, the names of cameras). Nothing listens on the network.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from lerobot.robots import Robot, RobotConfig

from embodied.core.options import from_mapping
from embodied.core.spec import CameraSpec, joints_of
from embodied.deployment.robots.base import GRIPPER
from embodied.deployment.robots.mapping import Entry, gripper_entry
from embodied.deployment.robots.sim import SimRobot
from embodied.envs.mujoco.config import SIDES
from embodied.envs.registry import TASKS, MujocoFamily


@RobotConfig.register_subclass("embodied")
@dataclass(kw_only=True)
class EmbodiedRobotConfig(RobotConfig):
    """Options of ``--robot.type=embodied``."""

    task: str = "lift"
    """Name of the task, whose objects are on the table."""
    robot: str = "so101"
    """Name of the arm, or the path of its YAML file; of both arms in a task for two, such as ``lift_bar``."""
    cameras: list[str] = field(default_factory=list)
    """Names of cameras: ``front``, ``wrist``."""
    width: int = 128
    height: int = 128
    """Pixels of their images."""
    use_degrees: bool = True
    """Whether joints are in degrees; otherwise they run from -100 to 100 over their range, as in older data."""
    seed: int = 0
    """Seed of the episodes: where the objects are."""
    new_episode_after_s: float = 2.0
    """The next observation after so long without an action is the first one of a new episode."""

    def __post_init__(self) -> None:
        """Do nothing: LeRobot's method would check cameras of its own."""


class EmbodiedRobot(Robot):
    """An arm that is simulated in real time. UserError for an unknown task, robot or camera."""

    config_class = EmbodiedRobotConfig
    name = "embodied"

    def __init__(self, config: EmbodiedRobotConfig) -> None:
        super().__init__(config)
        self.config, self.cameras = config, config.cameras
        specs = [CameraSpec(name, config.height, config.width) for name in config.cameras]
        options, two = TASKS[config.task].config, {"robots": dict.fromkeys(SIDES, config.robot)}
        robots = two if "robots" in options.__dataclass_fields__ else {"robot": config.robot}
        spec = MujocoFamily().spec(config.task, from_mapping(options, robots, f"task.{config.task}"), specs)
        self._sim = SimRobot(spec, {"task": {"name": config.task, **robots}})
        arms = self._sim.arms
        self._entries = {f"{side}{GRIPPER}": gripper_entry(arm, f"{side}{GRIPPER}") for side, arm in arms.items()}
        for name, joint in joints_of(arms).items():
            degrees = Entry(f"{name}.pos", "deg")
            share = Entry(f"{name}.pos", "percent", low=(joint.low + joint.high) / 2, high=joint.high)
            self._entries[f"{name}.pos"] = degrees if config.use_degrees else share
        self._episode, self._acted_s = 0, float("inf")

    @property
    def action_features(self) -> dict[str, type]:
        return dict.fromkeys(self._sim.action_features, float)

    @property
    def observation_features(self) -> dict[str, Any]:
        return self.action_features | dict.fromkeys(self.cameras, (self.config.height, self.config.width, 3))

    @property
    def is_connected(self) -> bool:
        return self._sim.is_connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        """Start the simulation and its first episode."""
        self._sim.connect()
        self._begin()

    def calibrate(self) -> None:
        """Do nothing: a simulated arm is calibrated."""

    def configure(self) -> None:
        """Do nothing: a simulated arm has no settings of its own."""

    def get_observation(self) -> dict[str, Any]:
        if time.monotonic() - self._acted_s > self.config.new_episode_after_s:
            self._begin()
        found = self._sim.get_observation()
        return {name: self._entries[name].to_robot(found[name]) for name in self.action_features} | {
            name: found[name] for name in self.cameras
        }

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Command position targets, which the simulated servos limit to their ranges."""
        self._sim.send_action({name: self._entries[name].from_robot(float(action[name])) for name in self._entries})
        self._acted_s = time.monotonic()
        return action

    def disconnect(self) -> None:
        self._sim.disconnect()

    def _begin(self) -> None:
        """Begin the next episode."""
        self._sim.reset(self.config.seed, self._episode)
        self._episode, self._acted_s = self._episode + 1, float("inf")
