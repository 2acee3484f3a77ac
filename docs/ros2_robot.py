"""A robot behind ROS 2 topics: a template, to copy and to change. Needs ROS 2 (rclpy) beside embodied-rl.

    /joint_states   sensor_msgs/JointState        ─┐                  ┌─► commands           std_msgs/Float64MultiArray
    object topics   geometry_msgs/PoseStamped     ─┴─► Ros2Robot ─────┴─► gripper_commands   std_msgs/Float64MultiArray

It is a node of its own and a robot in LeRobot's shape, so ``embodied.deploy`` drives it by a confirmed mapping:

    source /opt/ros/jazzy/setup.bash
    PYTHONPATH=docs python -m embodied.deploy bundle=bundles/pick_place robot=ros2_robot:Ros2Robot mapping=franka.json

Numbers pass unchanged, in the units and with the signs of ROS (rad, m); the mapping translates names, units and signs.
An observation is as old as the oldest message in it, by the stamp in its header: joints that stopped, and a camera that
died, hold the arm after 0.2 s. So perception has to publish at 10 Hz or more, with the stamp of its image.
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
    """Age of the oldest message, s, after which the robot counts as gone."""


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
    """The robot. ConnectionError if one of its topics is silent for ``lost_s``."""

    config_class = Ros2Config
    name = "ros2_robot"

    def __init__(self, config: Ros2Config) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._measured: dict[str, dict[str, float]] = {}  # numbers by topic
        self._at_s: dict[str, float] = {}  # when they were measured, on time.monotonic, by topic
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
    def topics(self) -> list[str]:
        """Topics of what is measured."""
        return [self.config.joint_states, *self.config.objects.values()]

    @property
    def is_connected(self) -> bool:
        return self._node is not None and self._silent() is None

    def _silent(self) -> str | None:
        """Return a topic whose last message is older than ``lost_s``."""
        now_s = time.monotonic()
        ages = {topic: now_s - self._at_s.get(topic, -float("inf")) for topic in self.topics}
        return next((topic for topic, age_s in ages.items() if age_s >= self.config.lost_s), None)

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
        while (silent := self._silent()) is not None:
            if time.monotonic() > deadline_s:
                self.disconnect()
                raise ConnectionError(f"nothing new on {silent}")
            time.sleep(0.01)

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        """Return the newest measurements, with the time at which the oldest of them was made."""
        if (silent := self._silent()) is not None:
            raise ConnectionError(f"nothing new on {silent} for {self.config.lost_s:g} s")
        with self._lock:
            found: dict[str, Any] = {"timestamp": min(self._at_s.values())}
            for numbers in self._measured.values():
                found |= numbers
        return found

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

    def _keep(self, topic: str, message: Any, numbers: dict[str, float]) -> None:
        """Keep the numbers of a message, with the time of its stamp on ``time.monotonic``."""
        stamp = message.header.stamp
        age_s = self._node.get_clock().now().nanoseconds * 1e-9 - (stamp.sec + stamp.nanosec * 1e-9)
        with self._lock:
            self._measured[topic], self._at_s[topic] = numbers, time.monotonic() - age_s

    def _on_joints(self, message: Any) -> None:
        numbers = joint_numbers(self.config, message.name, message.position, message.velocity)
        self._keep(self.config.joint_states, message, numbers)

    def _on_pose(self, name: str) -> Any:
        def keep(message: Any) -> None:
            at, turned = message.pose.position, message.pose.orientation
            numbers = pose_numbers(name, (at.x, at.y, at.z), (turned.x, turned.y, turned.z, turned.w))
            self._keep(self.config.objects[name], message, numbers)

        return keep
