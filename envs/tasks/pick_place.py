"""Pick and place: put a cube into a walled tray and let go. It cannot be pushed in, because the walls are higher."""

import mujoco
from torch import Tensor

from embodied.core.spec import Difference, Term
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.scene import BLUE, add_tray
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import Quantity
from embodied.envs.tasks.common import CubeTask, Placing, cube_quantities, draw
from embodied.envs.tasks.config import PickPlaceConfig


class PickPlace(Placing, CubeTask):
    """Put a cube into a walled tray and let go."""

    name = "pick_place"
    recordable = True
    instruction = "put the red cube into the blue tray"
    held_object = "cube"
    config: PickPlaceConfig

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        super().build_scene(spec)
        add_tray(spec, "tray", self.config.tray_half_m, self.config.wall_m, BLUE, 0.004 * self.scale.reach)

    def bind(self, view: View) -> None:
        super().bind(view)
        self.tray, self.half_height_m = view.mocap("tray"), self.config.cube_half_m

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        super().reset(ids, rng)
        self.tray[ids, :2] = draw(self.view, rng, "tray", self.config.tray_low_m, self.config.tray_high_m)

    def observed(self) -> tuple[Quantity, ...]:
        return (
            *cube_quantities(self, "cube"),
            Quantity(Term("tray", 2, "m", "base", meaning="x, y of the tray"), lambda: self.tray[:, :2]),
            Quantity(Term("tray_from_cube", 3, "m", "base", difference=Difference("tray", "cube_pos"))),
        )
