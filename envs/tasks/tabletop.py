"""Tabletop: three objects, two trays, and an instruction that names one object and one tray.

    slot   body           object
    0      target         the one that the instruction names
    1      distractor_1   the same shape in another colour
    2      distractor_2   the same colour in another shape

So neither the colour nor the shape alone identifies the target. Slots are bodies whose shape and colour change at every
reset (object_shapes.py); they stand in any order in cells of the table. The vocabulary is data.
"""

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embodied.core.spec import Difference, Instruction, Term
from embodied.core.types import Role
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.mujoco.config import Shape
from embodied.envs.mujoco.randomization.object_shapes import ShapeVariants
from embodied.envs.mujoco.scene import GREY, add_object, add_object_sensors, add_tray
from embodied.envs.mujoco.view import View
from embodied.envs.tasks.base import Quantity
from embodied.envs.tasks.common import Placing, cube_quantities, draw, stand
from embodied.envs.tasks.config import SLOTS, TabletopConfig

UPRIGHT = 0.2  # share of the reward that is paid for not tipping the target over
TIPPED = 0.5  # cosine of the tilt beyond which an object does not stand up again


class Tabletop(Placing):
    """Put the named one of three objects into the named one of two trays."""

    name = "tabletop"
    instruction = "put the object that is named into the tray that is named"
    objects = SLOTS[:1]
    held_object = SLOTS[0]
    recordable = True
    config: TabletopConfig
    half_width_m: Tensor
    half_height_m: Tensor

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.config.words.instructions

    def build_scene(self, spec: mujoco.MjSpec) -> None:
        words = self.config.words
        spec.option.impratio = 10  # otherwise round objects, which fingers touch in a point, slip out slowly
        shape, rgb = next(iter(words.shapes.values())), next(iter(words.colors.values()))
        for name in SLOTS:
            add_object(spec, name, shape, self.config.object_mass_kg, (*rgb, 1))
        add_object_sensors(spec, "target")
        for tray in words.trays:
            add_tray(spec, f"{tray}_tray", self.config.tray_half_m, self.config.wall_m, GREY, 0.004 * self.scale.reach)

    def shapes(self) -> Mapping[str, Sequence[Shape]]:
        return dict.fromkeys(SLOTS, tuple(self.config.words.shapes.values()))

    def bind(self, view: View) -> None:
        super().bind(view)
        words, config, num_envs = self.config.words, self.config, len(view.qpos)
        device = view.qpos.device
        self.trays = [view.mocap(f"{tray}_tray") for tray in words.trays]
        self.tray = view.qpos.new_zeros(num_envs, 3)
        shapes, colors = list(words.shapes.values()), list(words.colors.values())
        self.variants = ShapeVariants(view.batch, SLOTS, shapes, config.object_mass_kg)
        self.rgba, self.geoms = view.batch.expand("geom_rgba"), [view.model.geom(name).id for name in SLOTS]
        self.rgb_C3 = np.array(colors)
        self.half_size_K2 = view.tensor([(shape.half_width_m, shape.half_height_m) for shape in shapes])
        goals_G3 = torch.cartesian_prod(*(torch.arange(len(x), device=device) for x in (colors, shapes, self.trays)))
        self.goal_I3 = goals_G3.repeat_interleave(len(words.templates), 0)  # colour, shape and tray of each instruction
        self.cells = torch.cartesian_prod(view.tensor(config.cells_x_m), view.tensor(config.cells_y_m))
        self.shape_NB = torch.zeros(num_envs, len(SLOTS), dtype=torch.int64, device=device)
        self.color_NB = torch.zeros_like(self.shape_NB)
        self.half_width_m, self.half_height_m = view.qpos.new_zeros(2, num_envs)
        self._update_scene(torch.arange(num_envs, device=device))

    def reset(self, ids: Tensor, rng: EpisodeRng) -> None:
        words, config = self.config.words, self.config
        color, shape, _ = self.goal_I3[self.instruction_N[ids]].unbind(-1)
        self.color_NB[ids] = torch.stack([color, _other(color, len(words.colors), rng, "other_color"), color], -1)
        self.shape_NB[ids] = torch.stack([shape, shape, _other(shape, len(words.shapes), rng, "other_shape")], -1)
        order = torch.from_numpy(rng.unit("cells", len(self.cells)).argsort(-1)).to(ids.device)
        for slot, name in enumerate(SLOTS):
            place = self.cells[order[:, slot]] + self._jitter(config.jitter_m, rng, f"{name}_pos")
            stand(self.view, name, ids, rng, place, self.half_size_K2[self.shape_NB[ids, slot], 1], config.yaw_rad)
        for tray, (name, centre) in zip(self.trays, words.trays.items(), strict=True):
            tray[ids, :2] = self.view.tensor(centre) + self._jitter(config.tray_jitter_m, rng, f"{name}_tray")
        self._update_scene(ids)

    def _jitter(self, size_m: tuple[float, float], rng: EpisodeRng, stream: str) -> Tensor:
        """Draw uniform offsets [n, 2] of at most ``size_m`` to either side."""
        return draw(self.view, rng, stream, [-size for size in size_m], size_m)

    def _update_scene(self, ids: Tensor) -> None:
        """Set shapes and colours of the objects, and the target's tray, in envs ``ids`` [n]."""
        rows = ids.cpu().numpy()
        self.variants.apply(rows, self.shape_NB[ids].cpu().numpy())
        self.rgba[rows[:, None], self.geoms, :3] = self.rgb_C3[self.color_NB[ids].cpu().numpy()]
        tray_n = self.goal_I3[self.instruction_N[ids], 2]
        self.tray[ids] = torch.stack(self.trays)[tray_n, ids]
        self.half_width_m[ids], self.half_height_m[ids] = self.half_size_K2[self.shape_NB[ids, 0]].unbind(-1)

    def rewards(self, success: Tensor) -> dict[str, Tensor]:
        """Return the terms of placing, and ``upright``, without which policies do not learn not to tip the target."""
        placing = {name: (1 - UPRIGHT) * term for name, term in super().rewards(success).items()}
        return placing | {"upright": UPRIGHT * self._upright()}

    def failure(self) -> Tensor | None:
        lost = super().failure()
        if not self.config.fail_tipped:
            return lost
        tipped = self._upright() < TIPPED
        return tipped if lost is None else lost | tipped

    def _upright(self) -> Tensor:
        """Return the cosine of the target's tilt, [N]; 1 in its tray, and for targets that are not taller than wide."""
        x, y = self.view.body_qpos("target")[:, 4:6].unbind(-1)
        safe = self._inside() | (self.half_height_m <= self.half_width_m)
        return torch.where(safe, 1.0, (1 - 2 * (x.square() + y.square())).abs())

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "task/shape": self.shape_NB.clone(), "task/color": self.color_NB.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.shape_NB.copy_(state["task/shape"])
        self.color_NB.copy_(state["task/color"])
        self._update_scene(torch.arange(len(self.shape_NB)))

    def observed(self) -> tuple[Quantity, ...]:
        shapes = self.config.words.shapes
        shape = Term("target_shape", len(shapes), meaning=f"1 for its shape of {', '.join(shapes)}, else 0")
        return (
            *cube_quantities(self, "target"),
            Quantity(shape, lambda: one_hot(self.shape_NB[:, 0], len(shapes)).to(self.view.qpos)),
            Quantity(Term("tray", 2, "m", "base", meaning="x, y of the tray"), lambda: self.tray[:, :2]),
            Quantity(Term("tray_from_target", 3, "m", "base", difference=Difference("tray", "target_pos"))),
            *(self._place_of(name) for name in SLOTS[1:]),
        )

    def _place_of(self, name: str) -> Quantity:
        term = Term(f"{name}_pos", 3, "m", "base", meaning=f"x, y, z of {name}")
        return Quantity(term, lambda: self.view.body_qpos(name)[:, :3])

    @property
    def descriptions(self) -> tuple[str, ...]:
        words = self.config.words
        solids = tuple(f"{color} {shape}" for color in words.colors for shape in words.shapes)
        return (*solids, *(f"{tray} tray" for tray in words.trays))

    def body_descriptions(self) -> dict[str, Tensor]:
        solid_NB = self.color_NB * len(self.config.words.shapes) + self.shape_NB
        first = len(self.config.words.colors) * len(self.config.words.shapes)
        trays = enumerate(self.config.words.trays, first)
        of_trays = {f"{tray}_tray": torch.full_like(solid_NB[:, 0], index) for index, tray in trays}
        return dict(zip(SLOTS, solid_NB.unbind(1), strict=True)) | of_trays

    def body_roles(self) -> dict[str, Tensor]:
        tray_N = self.goal_I3[self.instruction_N, 2]
        other = torch.full_like(tray_N, Role.OTHER_OBJECT)
        by_body = dict.fromkeys(SLOTS[1:], other) | {"target": torch.full_like(tray_N, Role.OBJECT)}
        for tray, name in enumerate(self.config.words.trays):
            by_body[f"{name}_tray"] = torch.where(tray_N == tray, Role.PLACE, Role.OTHER_PLACE)
        return {name: role.to(torch.uint8) for name, role in by_body.items()}

    def target_positions(self) -> tuple[Tensor, Tensor]:
        return self.object, self.tray


def _other(index_n: Tensor, size: int, rng: EpisodeRng, stream: str) -> Tensor:
    """Draw for each index below ``size`` another one, all equally likely, int64 [n]."""
    return (index_n + 1 + torch.from_numpy(rng.uniform(stream, 0.0, size - 1.0)).long().to(index_n.device)) % size
