"""Move a robot to its default pose, slowly and within its limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embodied.core.spec import ArmSpec
from embodied.deployment.control.inference import Clock
from embodied.deployment.control.safety import Safety, Watchdog
from embodied.deployment.robots.base import GRIPPER, Robot, age, joint_names, joint_values

SPEED = 0.2  # share of the largest speed of the joints
SHARE = 0.5  # at most this share of a limit that an option tightened, so that the safety need not intervene
PERIOD_S = 0.02
REACHED = 0.02  # distance at which the pose counts as reached
MAX_S = 15.0


def move_home(
    robot: Robot, arm: ArmSpec, safety: Safety, clock: Clock, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Move to the default pose with the gripper as it is; return whether it was reached within MAX_S seconds.

    stop: called in every step; True ends the move, and the robot holds its measured position. UserError if the arm's
    pose is unknown, RobotHangs if the robot does not answer.
    """
    names, home = joint_names(arm), np.array([joint.home for joint in arm.joints])
    speed = np.array([joint.max_velocity for joint in arm.joints])
    step = PERIOD_S * np.minimum(SPEED * speed, SHARE * safety.limits.max_velocity_J)
    watchdog = Watchdog(clock, safety, PERIOD_S)

    def measured() -> tuple[np.ndarray, np.ndarray, float]:
        observation = robot.get_observation()
        watchdog.answered("get_observation")
        return joint_values(arm, observation), joint_values(arm, observation, "vel"), age(observation, clock.now())

    qpos, qvel, age_s = measured()
    finger_m = safety.hold()[1] if safety.started else arm.gripper.open_m
    began_s = clock.now()
    safety.start(qpos, finger_m, began_s, "the way home", age_s)
    target = qpos
    for tick in range(1, round(MAX_S / PERIOD_S)):
        stopped = stop()
        if stopped:
            target = qpos
        elif not safety.blind:
            target = target + np.clip(home - target, -step, step)
        sent, finger = safety.filter(target, finger_m, qpos, qvel, clock.now(), age_s)
        robot.send_action({**dict(zip(names, map(float, sent), strict=True)), GRIPPER: finger})
        watchdog.answered("send_action")
        if stopped:
            safety.report("stopped", "a person stopped the robot on its way home", clock.now())
            return False
        clock.sleep_until(began_s + tick * PERIOD_S)
        qpos, qvel, age_s = measured()
        if np.abs(qpos - home).max() < REACHED:
            return True
    return False
