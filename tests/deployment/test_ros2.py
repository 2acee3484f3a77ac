"""The ROS 2 template in docs/.

rclpy cannot be installed here, so its modules are replaced by stubs that pass messages on in this process. That proves
the template's own part: it imports no ROS before ``connect``, finds joints by name in whatever order they come, stamps
what it measured, keeps the order of commands, is a ``Driver`` that the control loop drives through a mapping, and
notices silence. It does not prove that calls and messages are those of a real ROS 2.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from embodied.core.errors import UserError
from embodied.deployment.bundle.runner import PolicyRunner
from embodied.deployment.control.inference import Clock, Inference
from embodied.deployment.control.loop import ControlLoop
from embodied.deployment.control.safety import Safety
from embodied.deployment.robots.base import Driver, age
from embodied.deployment.robots.mapping import Entry, MappedRobot, RobotMapping
from embodied.deployment.robots.setup import propose
from tests.deployment.test_mapping import reach_bundle


class Message:
    """A message with any fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Topics:
    """What is subscribed, and what was published, by topic."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Any], None]] = {}
        self.published: dict[str, list[Any]] = {}
        self.running = False
        self.stop = threading.Event()

    def create_publisher(self, kind: type, topic: str, depth: int) -> Any:
        sent = self.published.setdefault(topic, [])
        return types.SimpleNamespace(publish=sent.append)

    def create_subscription(self, kind: type, topic: str, callback: Callable[[Any], None], qos: Any) -> None:
        self.callbacks[topic] = callback

    def get_clock(self) -> Any:
        """The clock of ROS, which is not this computer's."""
        return types.SimpleNamespace(now=lambda: types.SimpleNamespace(nanoseconds=time.time_ns()))

    def destroy_node(self) -> None:
        self.running = False


def stamped(age_s: float = 0.0, **fields: Any) -> Message:
    """Return a message that was measured ``age_s`` seconds ago."""
    sec, nanosec = divmod(time.time_ns() - round(1e9 * age_s), 10**9)
    return Message(header=Message(stamp=Message(sec=sec, nanosec=nanosec)), **fields)


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Topics]:
    """Stubs of the modules of ROS 2 that the template imports."""
    found = Topics()
    executor = types.SimpleNamespace(add_node=lambda node: None, spin=found.stop.wait, shutdown=found.stop.set)
    modules = {
        "rclpy": {"init": lambda: None, "create_node": lambda name: found, "shutdown": lambda: None},
        "rclpy.executors": {"SingleThreadedExecutor": lambda: executor},
        "rclpy.qos": {"qos_profile_sensor_data": object()},
        "sensor_msgs.msg": {"JointState": Message},
        "std_msgs.msg": {"Float64MultiArray": Message},
        "geometry_msgs.msg": {"PoseStamped": Message},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent = name.partition(".")[0]
        if parent != name and parent not in modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    yield found
    found.stop.set()


@pytest.fixture
def template(root: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("ros2_robot", root / "docs" / "ros2_robot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ros2_robot"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_joints_are_found_by_name_and_commands_keep_their_order(template: types.ModuleType) -> None:
    config = template.Ros2Config(joints=["b", "a"], finger="f")
    found = template.joint_numbers(config, ["f", "a", "x", "b"], [0.04, 1.0, 9.0, 2.0], [0.0, 0.1, 9.0, 0.2])
    assert found == {"a.pos": 1.0, "b.pos": 2.0, "f.pos": 0.04, "a.vel": 0.1, "b.vel": 0.2}
    with pytest.raises(KeyError, match="b"):
        template.joint_numbers(config, ["f", "a"], [0.0, 1.0], [0.0, 0.0])
    assert template.command_numbers(config, {"f.pos": 0.01, "a.pos": 1.0, "b.pos": 2.0}) == ([2.0, 1.0], [0.01])


def test_poses_are_those_of_the_tasks(template: types.ModuleType) -> None:
    """A quaternion as ROS orders it (x, y, z, w), and the two columns of MuJoCo's matrix for it."""
    quat = np.array([0.1, -0.4, 0.3, 0.8]) / np.linalg.norm([0.1, -0.4, 0.3, 0.8])  # w, x, y, z
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, quat)
    found = template.pose_numbers("cube", (0.5, 0.1, 0.3), (*quat[1:], quat[0]))
    columns = matrix.reshape(3, 3).T[:2].ravel()
    assert list(found.values()) == pytest.approx([0.5, 0.1, 0.3, *columns])
    assert list(found)[2:4] == ["cube_pos[2]", "cube_rotation[0]"]


def test_the_template_is_driven_by_a_mapping(template: types.ModuleType, topics: Topics) -> None:
    runner = PolicyRunner(reach_bundle())
    bundle = runner.bundle
    config = template.Ros2Config(objects={"goal": "/goal"})  # observed as goal_pos
    arm, home = template.Ros2Robot(config), [joint.home for joint in bundle.arm.joints]
    names = ["fr3_finger_joint1", *reversed(config.joints)]

    def measure(camera_age_s: float = 0.0) -> None:
        state = stamped(name=names, position=[0.04, *reversed(home)], velocity=[0.0] * 8)
        topics.callbacks["/joint_states"](state)
        place = Message(position=Message(x=0.5, y=0.1, z=0.3), orientation=Message(x=0, y=0, z=0, w=1))
        topics.callbacks["/goal"](stamped(camera_age_s, pose=place))

    connecting = threading.Thread(target=arm.connect)
    connecting.start()
    while "/goal" not in topics.callbacks:
        pass
    measure()
    connecting.join(30)
    assert isinstance(arm, Driver)
    assert arm.is_connected
    joints = {f"joint{i}": Entry(f"fr3_joint{i}.pos", "rad", velocity=f"fr3_joint{i}.vel") for i in range(1, 8)}
    external = {f"goal[{i}]": f"goal_pos[{i}]" for i in range(3)}
    mapping = RobotMapping("ros2_robot", joints, Entry("fr3_finger_joint1.pos", "m"), external)
    assert propose(bundle, arm) == mapping
    mapped = MappedRobot(arm, mapping, bundle.arms)
    assert mapped.get_observation()["timestamp"] == min(arm._at_s.values())
    inference = Inference(runner, Clock())
    loop = ControlLoop(bundle, mapped, inference, Safety(bundle.arms))
    steps: list[int] = []
    loop.stop = lambda: measure() or steps.append(1) or False  # type: ignore[func-returns-value]
    record = loop.run(steps=3)
    inference.close()
    sent = topics.published["/joint_position_controller/commands"]
    assert len(sent) == record.ticks >= 3
    np.testing.assert_allclose([message.data for message in sent[-1:]], record.stack("target")[-1:])
    [finger_m] = topics.published["/gripper_position_controller/commands"][0].data
    assert finger_m == pytest.approx(0.035, abs=0.0051)  # at most a step of 1 cm from where it was
    measure(camera_age_s=1.5)  # the joints are new, the camera is dead and its last pose is sent again
    assert 1.5 <= age(mapped.get_observation(), time.monotonic()) < 2.0
    with pytest.raises(UserError, match=r"the observation is 1\.\d+ s old"):
        loop.run(steps=3)
    measure(camera_age_s=2.5)
    assert not arm.is_connected
    with pytest.raises(ConnectionError, match="nothing new on /goal for 2 s"):
        arm.get_observation()
    arm.disconnect()
    assert not arm.is_connected
