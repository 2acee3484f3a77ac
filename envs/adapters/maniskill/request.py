"""The request for a ManiSkill environment, and what its users are told where it cannot be built."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.spec import CameraSpec

INSTALL = "pip install -c constraints.txt -e '.[maniskill]'"
VULKAN = (
    "ManiSkill needs a Vulkan device even without rendering, and found none that works. As root, `bash "
    "envs/adapters/install_vulkan.sh` installs Mesa's software device on Debian and Ubuntu (Mesa 25 or newer)"
)
OUTCOMES = ("success", "fail")
STATE_MODE = "state_dict"


@dataclass(frozen=True, slots=True)
class Request:
    """Which environment to build, with ManiSkill's own names of its options. None: the environment's default."""

    id: str
    """Name of the environment, such as PickCube-v1."""
    robot_uids: str | None = None
    control_mode: str | None = None
    reward_mode: str | None = None
    obs_mode: str = STATE_MODE
    sim_backend: str = "physx_cpu"
    cameras: tuple[CameraSpec, ...] = ()
    """Cameras that observations have."""
