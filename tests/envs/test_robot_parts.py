"""A robot's parts are found by name, wherever they are in the file. Joints may have reference positions."""

from __future__ import annotations

import re
from pathlib import Path

import mujoco
import numpy as np
import pytest
from mujoco.batch import Batch

from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.envs.mujoco.config import ControlConfig
from embodied.envs.mujoco.robots.gripper_arm import AttachedArm
from embodied.envs.mujoco.robots.panda import Panda
from embodied.envs.mujoco.robots.parts import Parts
from embodied.envs.mujoco.scene import on_table

CURRENT = int(mujoco.mjtStage.mjSTAGE_VEL)


def variant(tmp_path: Path, change: tuple[str, str], **control: object) -> Panda:
    """The Panda with the first match of a pattern in its MJCF replaced."""
    text = Panda.mjcf.read_text()
    changed = re.sub(*change, text, count=1, flags=re.DOTALL)
    assert changed != text
    path = tmp_path / "robot.xml"
    path.write_text(changed)
    kind = type("Variant", (Panda,), {"mjcf": path})
    robot: Panda = kind(ControlConfig(**control))  # type: ignore[arg-type]
    return robot


def rolled(robot: Panda) -> dict[str, np.ndarray]:
    """What the robot measures after some random actions."""
    batch = Batch(on_table(robot).compile(), 4, 1, persistent=True)
    arm, random = AttachedArm(batch, robot), np.random.default_rng(0)
    arm.reset(np.arange(4), robot.home_qpos + random.uniform(-0.05, 0.05, (4, 7)))
    batch.forward(stage=CURRENT)
    for step in range(20):
        arm.apply(random.uniform(-1, 1, (4, 4)), np.array([0, 2, 3]) if step % 2 else None)
        batch.step(nstep=5, stage=CURRENT)
    return {name: value.numpy().copy() for name, value in arm.observe().items()}


def test_order_of_actuators_and_place_of_other_joints_do_not_matter(tmp_path: Path) -> None:
    wanted = rolled(Panda(ControlConfig()))
    actuators = re.search(r"<actuator>\n(.*?)</actuator>", Panda.mjcf.read_text(), re.DOTALL)
    assert actuators is not None
    reverse = "".join(reversed(actuators[1].splitlines(keepends=True)))
    weightless = '<inertial mass="1e-6" pos="0 0 0" diaginertia="1e-6 1e-6 1e-6"/>'
    extra = f'<body name="lamp">{weightless}<joint name="lamp" armature="1e-3" damping="0.1"/></body>'
    texts = {
        "reversed": (r"<actuator>\n.*?</actuator>", f"<actuator>\n{reverse}</actuator>"),
        "apart": (r'(<body name="link4")', rf"{extra}\1"),  # a joint that is not the arm's, between those that are
    }
    for change in texts.values():
        robot = variant(tmp_path, change)
        model = on_table(robot).compile()
        parts = Parts(model)
        assert [model.joint(i).name for i in parts.arm.joints] == [f"joint{i + 1}" for i in range(7)]
        assert not all(isinstance(where, slice) for where in parts.arm)
        for name, value in rolled(robot).items():
            np.testing.assert_allclose(value, wanted[name], atol=1e-4, err_msg=name)


def test_velocity_of_the_tool_equals_that_of_the_engine(tmp_path: Path) -> None:
    slide = r'<joint name="joint3"/>', '<joint name="joint3" type="slide" range="-1 1"/>'
    robot, random = variant(tmp_path, slide), np.random.default_rng(0)
    spec, of_site = on_table(robot), mujoco.mjtObj.mjOBJ_SITE
    spec.add_sensor(name="speed", type=mujoco.mjtSensor.mjSENS_FRAMELINVEL, objtype=of_site, objname="tcp")
    batch = Batch(spec.compile(), 4, 1)
    arm, speed_N3 = robot.attach(batch), batch.bind("sensordata")
    batch.bind("qpos")[:], batch.bind("qvel")[:] = random.uniform(-1, 1, (2, 4, 9))
    batch.forward(stage=CURRENT)
    np.testing.assert_allclose(arm.tcp_vel, speed_N3, atol=1e-12)


def test_reference_positions_are_in_the_kinematics(tmp_path: Path) -> None:
    robot = variant(tmp_path, (r'name="joint2" range="', 'name="joint2" ref="0.3" range="'))
    slide = r'<joint name="joint3"/>', '<joint name="joint3" type="slide" ref="0.1" range="-1 1"/>'
    robot.mjcf.write_text(robot.mjcf.read_text().replace(*slide))
    model = mujoco.MjModel.from_xml_path(str(robot.mjcf))
    data, chain = mujoco.MjData(model), Chain(robot.kinematics)
    for qpos in np.random.default_rng(0).uniform(-1, 1, (5, 7)):
        data.qpos[:7] = qpos
        mujoco.mj_kinematics(model, data)
        pos, mat, _ = chain.tool(qpos)
        np.testing.assert_allclose(pos, data.site("tcp").xpos, atol=1e-12)
        np.testing.assert_allclose(mat.reshape(-1), data.site("tcp").xmat, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((r'<position name="joint3"[^\n]*\n', ""), "joint 'joint3': has 0 actuators"),
        ((r'<position name="left_finger".*?</actuator>', "</actuator>"), "gripper"),
        ((r'joint="joint3"/>\n', 'joint="joint2"/>\n'), "joint 'joint2': has 2 actuators"),
    ],
)
def test_what_cannot_be_driven_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    robot = variant(tmp_path, change)
    with pytest.raises(UserError, match=message):
        Parts(on_table(robot).compile())
