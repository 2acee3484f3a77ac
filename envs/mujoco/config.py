"""Options of our simulators, and of the objects that tasks put into them."""

from dataclasses import field
from typing import Any, Literal

from embodied.core.errors import UserError
from embodied.core.options import DeviceName, Positive, PositiveInt, config_dataclass
from embodied.envs.mujoco.randomization.terms import RandomizationTerm
from embodied.envs.rendering.config import CameraRandomization


@config_dataclass
class SimConfig:
    """Options of the simulator."""

    name: Literal["mujoco"] = "mujoco"
    """Simulator."""
    randomization: dict[str, RandomizationTerm | None] = field(default_factory=dict)
    """Terms of domain randomisation by name; null is no term."""
    camera_randomization: CameraRandomization = field(default_factory=CameraRandomization)
    """How far images vary between episodes."""
    dump_dir: str = "nan_dumps"
    """Directory where the NaN guard writes the states of diverged envs; relative to the run directory."""


@config_dataclass
class WarpConfig:
    """Options of the simulator MuJoCo Warp."""

    name: Literal["warp"] = "warp"
    """Simulator."""
    device: DeviceName = "auto"
    """Device of the simulation; auto is that of the learner, ``device=``."""
    max_contacts: PositiveInt = 64
    """Contacts per env, on average over all envs, for which there is memory."""
    max_constraints: PositiveInt = 192
    """Rows of constraints per env for which there is memory; a contact has 3 to 6, a joint at its limit 1."""
    randomization: dict[str, Any] = field(default_factory=dict)
    """Must be empty: domain randomisation needs sim=mujoco."""
    camera_randomization: dict[str, Any] = field(default_factory=dict)
    """Must be empty: cameras need sim=mujoco."""
    dump_dir: str = "nan_dumps"
    """Directory where the NaN guard writes the states of diverged envs; relative to the run directory."""

    def __post_init__(self) -> None:
        for key in ("randomization", "camera_randomization"):
            if getattr(self, key):
                raise UserError(f"sim.{key}: sim=warp has no domain randomisation, allowed: none, or sim=mujoco")


@config_dataclass
class Shape:
    """Kind and size of an object."""

    kind: Literal["box", "cylinder", "sphere"]
    """box, cylinder (upright) or sphere."""
    size_m: tuple[Positive, ...]
    """Half sizes of a box; radius and half height of a cylinder; radius of a sphere."""

    def __post_init__(self) -> None:
        length = {"box": 3, "cylinder": 2, "sphere": 1}[self.kind]
        if len(self.size_m) != length:
            raise UserError(f"size_m: got {list(self.size_m)}, a {self.kind} has {length}")

    @property
    def half_width_m(self) -> float:
        """Distance from the centre to a finger that holds the object."""
        return self.size_m[1] if self.kind == "box" else self.size_m[0]

    @property
    def half_height_m(self) -> float:
        """Height of the centre when the object stands on the table."""
        return self.size_m[-1]
