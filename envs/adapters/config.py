"""Options of other simulators and of their environments."""

from dataclasses import field
from typing import Any, Literal

from embodied.core.errors import UserError
from embodied.core.options import NonNegativeInt, Positive, PositiveInt, Text, config_dataclass


@config_dataclass
class EnvpoolTaskConfig:
    """Options of an environment of EnvPool."""

    max_episode_steps: PositiveInt | None = None
    """Time limit, control steps; null is EnvPool's own."""
    instruction: Text | None = None
    """Instruction for policies that read one; null is the name of the environment."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the environment, by the names of EnvPool: ``task.options.frame_skip=4``."""


@config_dataclass
class EnvpoolConfig:
    """Options of EnvPool."""

    batch_size: PositiveInt | None = None
    """Number of envs of a group that get their next decisions together, as soon as they are done, while the others are
    still simulated; null waits for the whole group."""


@config_dataclass
class GymConfig:
    """Options of an environment of gymnasium."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor."""
    max_episode_steps: PositiveInt | None = None
    """Time limit, control steps; null is that of its registration, or 1,000 if it has none."""
    control_dt_s: Positive | None = None
    """Seconds between two actions; null is its own ``dt``, or of its ``render_fps``."""
    success_key: Text | None = None
    """Key of ``info`` that says whether the episode has succeeded; null is is_success or success, if one of them is in
    an info of the first steps."""
    instruction: Text | None = None
    """Instruction for policies that read one; null is the name of the environment."""

    def __post_init__(self) -> None:
        if "render_mode" in self.kwargs:
            raise UserError("kwargs: render_mode is set where it is needed, leave it out")


@config_dataclass
class GymSimConfig:
    """Options of gymnasium."""

    processes: NonNegativeInt | None = None
    """Processes that step a group of envs; 0 steps them in this process. null is one for each thread of the group's
    budget if a step takes longer than 0.1 ms, else 0. Always 0 for an environment's own vector environment."""


@config_dataclass
class ManiSkillTaskConfig:
    """Options of an environment of ManiSkill. null is the environment's own default."""

    robot_uids: Text | None = None
    """Robot, such as panda or panda_wristcam."""
    control_mode: Text | None = None
    """What actions mean, such as pd_joint_delta_pos or pd_ee_delta_pose."""
    reward_mode: Literal["normalized_dense", "dense", "sparse", "none"] | None = None
    """Kind of reward; for most environments the default is normalized_dense."""
    obs_mode: Literal["state_dict", "state"] = "state_dict"
    """Layout of the state without cameras: named vectors in the order of their names, or one vector in ManiSkill's
    order. It must be that of the demonstrations that a policy learns from."""
    terminate_on: Literal["none", "fail", "success", "success_or_fail"] = "fail"
    """Outcomes that end an episode before its time limit."""
    max_episode_steps: PositiveInt | None = None
    """Time limit, control steps."""
    instruction: Text | None = None
    """Instruction for policies that read one; by default the environment's id, as embodied.convert writes it."""


@config_dataclass
class ManiSkillConfig:
    """Options of ManiSkill."""

    sim_backend: Literal["physx_cpu", "physx_cuda"] = "physx_cpu"
    """On the CPU envs are stepped by as many processes as the simulation has threads. On a GPU all are stepped at
    once, and an episode is then a function of the plans of all episodes that start in the same control step."""
