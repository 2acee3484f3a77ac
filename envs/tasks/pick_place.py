"""Pick and place: put a cube into a walled tray and let go.

The walls are higher than the cube, so it cannot be pushed in.
"""

from __future__ import annotations

import mujoco
from torch import Tensor

from embodied.core.options import config_dataclass
from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import BLUE, RED, add_cube, add_tray
from embodied.envs.mujoco.view import View
from embodied.envs.registry import TASKS
from embodied.envs.tasks.common import cube_state, cube_terms, place_cube
from embodied.envs.tasks.placing import Placing, PlacingConfig


@config_dataclass
class PickPlaceConfig(PlacingConfig):
    """Options of PickPlace. ``low`` and ``high`` are opposite corners of an area (x, y); the areas do not overlap."""

    cube_half_m: float = 0.02
    """Half the cube's edge."""
    cube_mass_kg: float = 0.064
    """Mass of the cube."""
    cube_low_m: tuple[float, float] = (0.45, -0.2)
    """Area of the table where the cube starts."""
    cube_high_m: tuple[float, float] = (0.65, 0.0)
    """Opposite corner of that area."""
    tray_low_m: tuple[float, float] = (0.45, 0.14)
    """Area of the table where the tray's centre starts."""
    tray_high_m: tuple[float, float] = (0.65, 0.22)
    """Opposite corner of that area."""


@TASKS.register("pick_place", config=PickPlaceConfig)
class PickPlace(Placing):
    """Put a cube into a walled tray and let go."""

    name = "pick_place"
    instruction = "put the red cube into the blue tray"
    object_name = "cube"
    config: PickPlaceConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        add_cube(spec, "cube", self.config.cube_half_m, self.config.cube_mass_kg, RED)
        add_tray(spec, "tray", self.config.tray_half_m, self.config.wall_m, BLUE)

    def bind(self, view: View) -> None:
        self.view = view
        self.tray = view.mocap("tray")
        self.cube = self.object = view.body_qpos("cube")[:, :3]
        self.object_vel = view.body_qvel("cube")[:, :3]
        self.half_width_m = self.half_height_m = self.config.cube_half_m

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        place_cube(
            self.view, "cube", ids, rng, self.config.cube_low_m, self.config.cube_high_m, self.config.cube_half_m
        )
        tray = rng.uniform("tray", list(self.config.tray_low_m), list(self.config.tray_high_m))
        self.tray[ids, :2] = self.view.tensor(tray)

    def state_terms(self) -> tuple[Term, ...]:
        offset = Term("tray_from_cube", 3, "m", "base", difference=Difference("tray", "cube_pos"))
        return (*cube_terms("cube"), Term("tray", 2, "m", "base", meaning="x, y of the tray"), offset)

    def observe(self) -> dict[str, Tensor]:
        return {
            **cube_state(self.view, "cube"),
            "tray": self.tray[:, :2],
            "tray_from_cube": self.tray - self.cube,
        }
