"""What domain randomisation needs on a device: model fields that follow a batch on the CPU, and random numbers.

Randomizer ──► Batch on the CPU: drawn and derived values ──► ``DeviceFields.send`` ──► arrays of MuJoCo Warp's model
"""

from functools import cache

import mujoco
import numpy as np
import torch
from mujoco.batch import MODEL_FIELDS, Batch
from torch import Tensor

from embodied.core.episodes import Ints
from embodied.envs.episodes.seeding import EpisodeRng, counters
from embodied.envs.mujoco.robots.base import Simulations
from embodied.envs.mujoco.scene import HIDDEN_M

DERIVED = (
    "body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "tendon_length0", "tendon_invweight0",
    "tendon_lengthspring", "eq_data", "geom_rbound", "geom_aabb",
)  # fmt: skip
"""Fields that ``mj_setConst`` computes and MuJoCo Warp simulates with."""
SHAPE_FIELDS = {"geom_size", "geom_rbound", "geom_aabb"}
UNUSED = {"bvh_aabb", "dof_M0", "dof_length"}
"""Fields that follow from others and MuJoCo Warp does not simulate with."""


class DeviceFields:
    """Copy model fields that vary between envs to a device. Their arrays keep their addresses.

    source: its expanded fields are copied, and those that are derived from them. batch: of the same model, or of that
    of ``with_all_kinds``, where one geom of an object is the real one.
    """

    def __init__(self, source: Batch, batch: Simulations, device: torch.device) -> None:
        names = {name for name in MODEL_FIELDS if source.expanded(name) is not None}
        if not names.isdisjoint(mujoco.MjModel._setconst_inputs):
            names.update(name for name in DERIVED if getattr(source.model, name).size)
        names -= UNUSED
        ours, theirs = source.model, batch.model
        first_G = theirs.body_geomadr[theirs.geom_bodyid]
        place_G = np.minimum(np.arange(theirs.ngeom) - first_G, ours.body_geomnum[theirs.geom_bodyid] - 1)
        self._geom_G = ours.body_geomadr[theirs.geom_bodyid] + place_G  # geom of ``source`` that each geom stands for
        if theirs.ngeom > ours.ngeom:  # ``with_all_kinds``
            names -= {"geom_type", "geom_condim"}
        self.source, self.device, self._type_G = source, device, theirs.geom_type
        self._live: dict[str, Tensor] = {name: batch.expand(name) for name in sorted(names)}

    def send(self, ids: Ints) -> None:
        """Copy the values of envs ``ids`` [n]."""
        rows, types = torch.from_numpy(ids).to(self.device), self.source.expanded("geom_type")
        for name, live in self._live.items():
            values = self.source.expanded(name)
            if values is None:  # a derived field that has the model's own value in all envs is not expanded
                continue
            values = values[ids]
            if name.startswith("geom_"):
                values = values[:, self._geom_G]
            if name in SHAPE_FIELDS and types is not None:
                values[types[ids][:, self._geom_G] != self._type_G] = HIDDEN_M
            live[rows] = torch.from_numpy(values).to(live)


class DeviceRng:
    """The numbers of ``EpisodeRng`` for the present episodes of N envs, on a device, equal but for rounding.

    steps_left_N: control steps until each episode's time limit, live.
    """

    def __init__(self, steps_left_N: Tensor) -> None:
        self._steps_left_N = steps_left_N
        self._key_N, self._limit_N = torch.zeros_like(steps_left_N), torch.zeros_like(steps_left_N)

    def start(self, rows: Tensor, rng: EpisodeRng, limit_n: Ints) -> None:
        """Begin the episodes of ``rng`` with these time limits in envs ``rows`` [n]."""
        self._key_N[rows] = torch.from_numpy(rng.key_n.view(np.int64)).to(rows.device)
        self._limit_N[rows] = torch.from_numpy(limit_n).to(rows.device)

    def normal(self, stream: str, size: int, rows: slice | Tensor) -> Tensor:
        """Return standard normals of the present control step, float64 [n, size]; see ``EpisodeRng.normal``."""
        half = -(-size // 2)
        step_n = (self._limit_N - self._steps_left_N)[rows]
        first_n = self._key_N[rows] + step_n * (2 * half) * _GOLDEN
        unit = _uniform(first_n[:, None] + _counters(stream, 2 * half, first_n.device))
        radius, angle = (-2 * torch.log1p(-unit[:, :half])).sqrt(), 2 * torch.pi * unit[:, half:]
        return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :size]


def _signed(number: int) -> int:
    """Return the signed integer with the bits of an unsigned one; torch has no arithmetic of the latter."""
    return number - (1 << 64) if number >> 63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)


@cache
def _counters(stream: str, size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(counters(stream, size).view(np.int64).copy()).to(device)


def _uniform(z: Tensor) -> Tensor:
    """Return numbers in [0, 1), by the finaliser of ``EpisodeRng``."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return _shifted(z ^ _shifted(z, 31), 11).double() * 2.0**-53


def _shifted(z: Tensor, shift: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)
