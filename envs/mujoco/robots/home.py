"""Whether an arm can begin at its home and move its tool from there; errors say what to change."""

import mujoco
import numpy as np

from embodied.core.arm import Chain
from embodied.core.errors import UserError
from embodied.envs.mujoco.robot_file import RobotFile
from embodied.envs.mujoco.robots.gripper_description import GripperDescription

HOME_SLACK = 1e-3  # how far home may be beyond a joint's range, rad or m
TILT_DEG = 30.0  # greatest tilt and turn at home of a tool that is kept vertical and does not turn
OUTSIDE_M = 0.05  # how far outside of the workspace the tool may be at home, of an arm as large as the Panda
IN_MM = 10.0  # distance of the tool from the origin, m, that no arm on a table has
SQUARE_DEG = 5.0  # error of a right angle; the gripper closes along the tool's x or y axis


def check_home(robot: GripperDescription, file: RobotFile) -> None:
    """Raise UserError for a home beyond joints' ranges, beside the base, or tilted or turned.

    Also for one where actions cannot move the tool.
    """
    for joint in robot.kinematics.joints:
        if not joint.low - HOME_SLACK <= joint.home <= joint.high + HOME_SLACK:
            allowed = f"{joint.low:.3g} to {joint.high:.3g}{' (degrees?)' if joint.kind == 'hinge' else ''}"
            raise UserError(f"robot {robot.name}: home {joint.name}: got {joint.home:g}, allowed: {allowed}")
    if robot.config.mode != "ee_delta":
        return
    _, mat, jacobian_6J = Chain(robot.kinematics).tool(robot.home_qpos)
    config, free = robot.config, robot.config.orientation == "free"
    if stuck := stuck_along(mat, jacobian_6J, free, config.rotation):
        keys = f"mode={config.mode}, orientation={config.orientation}, rotation={str(config.rotation).lower()}"
        reason = f"the {robot.num_joints} joints of robot {robot.name} cannot move the tool along {stuck} alone"
        others = {"rotation=false": (free, False), "orientation=free": (True, config.rotation)}
        others |= {"orientation=free with rotation=false": (True, False)}
        works = [name for name, other in others.items() if not stuck_along(mat, jacobian_6J, *other)]
        allowed = ", or ".join([*works[:1], "mode=joint_delta"])
        raise UserError(f"control: got {keys}, but {reason}, allowed: {allowed}")
    _check_place(robot)
    tilt_deg = np.degrees(np.arccos(-mat[2, 2].clip(-1, 1)))
    if not free and tilt_deg > TILT_DEG:
        got = f"at home the tool is tilted by {tilt_deg:.0f} deg from vertical, allowed: up to {TILT_DEG:g}"
        raise UserError(f"robot {robot.name}: {got}: change home, or the quat of tool, whose z axis points down")
    yaw_deg = np.degrees(np.arctan2(mat[1, 0], mat[0, 0]))
    if not (free or robot.config.rotation) and abs(yaw_deg) > TILT_DEG:  # zero actions would turn it to 0
        got = f"at home the tool is turned by {yaw_deg:.1f} deg about the vertical, at most {TILT_DEG:g}"
        raise UserError(f"robot {robot.name}: {got}: {_turned_back(file, 90 * round(yaw_deg / 90), yaw_deg)}")


def _check_place(robot: GripperDescription) -> None:
    """Raise UserError for a home outside of the workspace, if a file in mm or a base that is turned explains it.

    Otherwise it may be meant: the check ``still`` of ``embodied.tasks`` names it, if the arm does not stand still.
    """
    tool_3, (low_3, high_3) = robot.home_tool_m, np.array(robot.workspace_m)
    beyond_m = np.maximum(low_3 - tool_3, tool_3 - high_3).max()
    if beyond_m <= OUTSIDE_M * robot.scale.reach:
        return
    at, low, high = (", ".join(f"{x:.3g}" for x in place) for place in (tool_3, low_3, high_3))
    got = f"at home the tool is at ({at}) m, {beyond_m:.3g} m outside of the workspace, from ({low}) to ({high})"
    x, y, _ = tool_3 - robot.kinematics.joints[0].pos_m
    if np.linalg.norm(tool_3) > IN_MM:
        cure = "are its lengths in mm? Needed: m"
    elif x < abs(y):
        cure = "it is beside or behind the base, and an arm must face +x: turn the base in the MJCF, or change home"
    else:
        return
    raise UserError(f"robot {robot.name}: {got}: {cure}")


def _turned_back(file: RobotFile, turn_deg: float, yaw_deg: float) -> str:
    """Say how to turn the tool back to 0: by the quat of ``tool``, if it is a multiple of a right angle away."""
    if abs(yaw_deg - turn_deg) > SQUARE_DEG or file.tool.site == "tcp":
        return "change home, or turn the site of the tool"
    quat, half = np.zeros(4), np.radians(turn_deg) / 2
    mujoco.mju_mulQuat(quat, np.array(file.tool.quat), np.array([np.cos(half), 0, 0, np.sin(half)]))
    return f"write tool.quat: [{', '.join(f'{x:.7g}' for x in quat.round(7) + 0.0)}], or change home"


def stuck_along(mat_33: np.ndarray, jacobian_6J: np.ndarray, free: bool, rotation: bool) -> str:
    """Return the first of x, y, z and yaw that joints cannot move the tool along alone; empty if there is none.

    free: whether the tool may tilt; rotation: whether actions turn it.
    """
    rows = np.vstack([jacobian_6J, -mat_33[:, 2] @ jacobian_6J[3:]])  # the last one: turning about the tool's own axis
    moves = [("x", 0), ("y", 1), ("z", 2)] + [("yaw", 6 if free else 5)] * rotation
    kept = rows[[row for _, row in moves] if free else slice(6)]
    for number, (name, row) in enumerate(moves):
        wanted = np.eye(len(kept))[number if free else row]
        if np.linalg.norm(kept @ np.linalg.lstsq(kept, wanted, rcond=1e-3)[0] - wanted) > 0.5:
            return name
    return ""
