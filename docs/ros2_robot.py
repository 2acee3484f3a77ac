"""A robot behind ROS 2 topics: a template, to copy and to change. Needs ROS 2 (rclpy) beside embodied-rl.

    /joint_states   sensor_msgs/JointState        ─┐                  ┌─► commands           std_msgs/Float64MultiArray
    object topics   geometry_msgs/PoseStamped     ─┴─► Ros2Robot ─────┴─► gripper_commands   std_msgs/Float64MultiArray

It is a node of its own and a robot in LeRobot's shape, so ``embodied.deploy`` drives it by a confirmed mapping:

    source /opt/ros/jazzy/setup.bash
    PYTHONPATH=docs python -m embodied.deploy bundle=bundles/pick_place robot=ros2_robot:Ros2Robot mapping=franka.json

Numbers pass unchanged, in the units and with the signs of ROS (rad, m); the mapping translates names, units and signs.
The controllers behind the command topics must follow position targets as the arm of training does: a joint impedance
controller with the gains of bundle.json (arm.joints, stiffness and damping).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FRANKA = tuple(f"fr3_joint{i}" for i in range(1, 8))


@dataclass(kw_only=True)
class Ros2Config:
    """Options of the robot: ``robot_options='{"objects": {"cube": "/cube/pose", "tray": "/tray/pose"}}'``."""

    joints: Sequence[str] = FRANKA
    """Joints of the arm in /joint_states, in the order of the command topic."""
    finger: str = "fr3_finger_joint1"
    """Finger in /joint_states, m from the centre."""
    joint_states: str = "/joint_states"
    """Topic of the measured joints."""
    commands: str = "/joint_position_controller/commands"
    """Topic of the arm's position targets."""
    gripper_commands: str = "/gripper_position_controller/commands"
    """Topic of the finger's position target."""
    objects: Mapping[str, str] = field(default_factory=dict)
    """Topics of poses in the frame of the arm's base, by name. A pose named cube is observed as cube_pos[0] to [2], m,
    and cube_rotation[0] to [5]; ``external`` of the mapping gives other names, such as "tray[0]": "tray_pos[0]"."""
    lost_s: float = 2.0
    """Seconds without /joint_states after which the robot counts as gone."""


def joint_numbers(
    config: Ros2Config, names: Sequence[str], positions: Sequence[float], velocities: Sequence[float]
) -> dict[str, float]:
    """Return the observed numbers of a JointState by name, whatever the order of its joints.

    KeyError for a joint that it lacks. Joints that it has beside those of the arm are left out.
    """
    at, speed = dict(zip(names, positions, strict=True)), dict(zip(names, velocities, strict=True))
    found = {f"{name}.pos": float(at[name]) for name in (*config.joints, config.finger)}
    return found | {f"{name}.vel": float(speed[name]) for name in config.joints}


def pose_numbers(
    name: str, position: tuple[float, float, float], quaternion_xyzw: tuple[float, float, float, float]
) -> dict[str, float]:
    """Return the observed numbers of a pose: its position, and the first two columns of its rotation matrix."""
    x, y, z, w = quaternion_xyzw
    first = (1 - 2 * (y * y + z * z), 2 * (x * y + z * w), 2 * (x * z - y * w))
    second = (2 * (x * y - z * w), 1 - 2 * (x * x + z * z), 2 * (y * z + x * w))
    found = {f"{name}_pos[{i}]": float(value) for i, value in enumerate(position)}
    return found | {f"{name}_rotation[{i}]": float(value) for i, value in enumerate((*first, *second))}


def command_numbers(config: Ros2Config, action: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return the data of both command messages for an action by name."""
    return [float(action[f"{name}.pos"]) for name in config.joints], [float(action[f"{config.finger}.pos"])]


class Ros2Robot:
    """The robot. ConnectionError if nothing is measured for ``lost_s``."""

    config_class = Ros2Config
    name = "ros2_robot"

    def __init__(self, config: Ros2Config) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._measured: dict[str, float] = {}
        self._objects: dict[str, float] = {}
        self._at_s = -float("inf")
        self._node: Any = None
        self._thread: threading.Thread | None = None

    @property
    def observation_features(self) -> dict[str, Any]:
        names = [f"{name}.pos" for name in (*self.config.joints, self.config.finger)]
        names += [f"{name}.vel" for name in self.config.joints]
        for name in self.config.objects:
            names += pose_numbers(name, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))
        return dict.fromkeys(names, float)

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys((f"{name}.pos" for name in (*self.config.joints, self.config.finger)), float)

    @property
    def is_connected(self) -> bool:
        return self._node is not None and time.monotonic() - self._at_s < self.config.lost_s

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        """Start the node, and wait until the joints and all objects have been measured."""
        import rclpy
        from geometry_msgs.msg import PoseStamped
        from rclpy.executors import SingleThreadedExecutor
        from rclpy.qos import qos_profile_sensor_data
        from sensor_msgs.msg import JointState
        from std_msgs.msg import Float64MultiArray

        config = self.config
        rclpy.init()
        self._node = rclpy.create_node("embodied_deploy")
        self._message = Float64MultiArray
        self._arm = self._node.create_publisher(Float64MultiArray, config.commands, 1)
        self._gripper = self._node.create_publisher(Float64MultiArray, config.gripper_commands, 1)
        self._node.create_subscription(JointState, config.joint_states, self._on_joints, qos_profile_sensor_data)
        for name, topic in config.objects.items():
            self._node.create_subscription(PoseStamped, topic, self._on_pose(name), qos_profile_sensor_data)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        self._thread = threading.Thread(target=self._executor.spin, daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + 10.0
        while not self._measured or len(self._objects) < 9 * len(config.objects):
            if time.monotonic() > deadline_s:
                self.disconnect()
                raise ConnectionError(f"nothing on {', '.join([config.joint_states, *config.objects.values()])}")
            time.sleep(0.01)

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        """Return the newest measurements, with the time at which the joints' arrived."""
        with self._lock:
            found, at_s = self._measured | self._objects, self._at_s
        if time.monotonic() - at_s > self.config.lost_s:
            raise ConnectionError(f"nothing on {self.config.joint_states} for {self.config.lost_s:g} s")
        return {**found, "timestamp": at_s}

    def send_action(self, action: Mapping[str, float]) -> dict[str, float]:
        """Publish position targets."""
        arm, gripper = command_numbers(self.config, action)
        self._arm.publish(self._message(data=arm))
        self._gripper.publish(self._message(data=gripper))
        return dict(action)

    def disconnect(self) -> None:
        """End the node."""
        import rclpy

        if self._node is not None:
            self._executor.shutdown()
            self._node.destroy_node()
            rclpy.shutdown()
        self._node = None

    def _on_joints(self, message: Any) -> None:
        measured = joint_numbers(self.config, message.name, message.position, message.velocity)
        with self._lock:
            self._measured, self._at_s = measured, time.monotonic()

    def _on_pose(self, name: str) -> Any:
        def keep(message: Any) -> None:
            at, turned = message.pose.position, message.pose.orientation
            found = pose_numbers(name, (at.x, at.y, at.z), (turned.x, turned.y, turned.z, turned.w))
            with self._lock:
                self._objects |= found

        return keep
