"""The registry of robots, and the options of arms with a parallel gripper."""

from typing import Any, Literal

from embodied.core.errors import UserError
from embodied.core.options import config_dataclass
from embodied.core.registry import Registry


@config_dataclass
class ControlConfig:
    """How actions move the arm."""

    mode: Literal["ee_delta", "joint_delta"] = "ee_delta"
    """ee_delta: actions displace the tool centre point, gripper kept vertical. joint_delta: they displace joints."""
    delta_m: float = 0.06
    """Displacement of the tool at action 1."""
    delta_rad: float = 0.15
    """Rotation, or displacement of each joint, at action 1."""
    gripper_m: float = 0.01
    """Greatest movement of each finger's target per control step; closing from open takes about five steps."""
    rotation: bool = False
    """With ee_delta, add a rotation about the vertical as the action before the gripper."""
    damping: float = 0.03
    """Damping of the least-squares inverse kinematics."""
    posture_gain: float = 0.03
    """Share of the distance to the home posture that the null space moves per control step."""
    workspace_low_m: tuple[float, float, float] = (0.25, -0.35, 0.012)
    """One corner of the box that the tool centre point's target stays in."""
    workspace_high_m: tuple[float, float, float] = (0.75, 0.35, 0.45)
    """The opposite corner."""

    def __post_init__(self) -> None:
        if self.rotation and self.mode != "ee_delta":
            raise UserError(f"rotation: got true with mode={self.mode}, allowed with mode=ee_delta only")


ROBOTS: Registry[Any] = Registry("robot")
"""Classes of robots (``embodied.envs.mujoco.robots.base.Robot``), built as ``build(control)``."""

ROBOTS.declare("panda", "embodied.envs.mujoco.robots.panda:Panda", ControlConfig)
