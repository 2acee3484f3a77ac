"""What the numbers of a data set may be meant as, if they are shifted in time, or in another unit, order or sign."""

import json
from collections.abc import Sequence
from itertools import permutations
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from embodied.core.spec import Box
from embodied.data.columns import PERCENT, ROUNDING, Conversion, option_words, physical
from embodied.data.faults import Fault

SIGN = "the other sign"
FACTORS = {"degrees": pi / 180, "radians": 180 / pi, "mm": 1e-3, "m": 1e3, SIGN: -1.0}


class Meaning(NamedTuple):
    """Numbers as they may be meant, and the names and descriptions of the faults that this undoes."""

    told: tuple[tuple[str, str], ...]
    matrix: Tensor
    """Homogeneous, [D + 1, D + 1]: maps recorded numbers to meant ones."""
    shift: int = 0
    state_shift: int = 0
    """Frames by which actions, and states, are meant to be earlier."""

    def apply(self, numbers: Tensor) -> Tensor:
        return numbers @ self.matrix[:-1, :-1].T + self.matrix[:-1, -1]

    def after(self, first: "Meaning") -> "Meaning":
        shifts = self.shift + first.shift, self.state_shift + first.state_shift
        return Meaning(first.told + self.told, self.matrix @ first.matrix, *shifts)

    def faults(self, what: str, names: Sequence[str], where: str) -> list[Fault]:
        """Return the faults of the column ``what``, state or action; each names the options that cure all."""
        linear = self.matrix[:-1, :-1]
        order = linear.abs().argmax(1, keepdim=True)
        entries = json.dumps([names[i] for i in order[:, 0]], separators=(",", ":"))
        cures = {"shift": "Each frame must have what was observed, and the action that was chosen then"}
        cures["order"] = f"'data_keys.{what}.entries={entries}'"
        cures["units"] = cures["sign"] = option_words(what, linear.gather(1, order)[:, 0], self.matrix[:-1, -1])
        return [Fault(f"{what} {name}", True, told, where, cures[name]) for name, told in self.told]


def meanings(best: Meaning, space: Box, action_ETA: Tensor) -> list[Meaning]:
    """Return what recorded actions may be meant as, if they have one fault more than those that ``best`` undoes."""
    names, eye, found = space.names, torch.eye(space.size + 1), list[Meaning]()
    for frames, late in ((1, "late"), (-1, "early")):
        found.append(Meaning((("shift", f"actions are one step {late}"),), eye, frames, 0))
        found.append(Meaning((("shift", f"states are one step {late}"),), eye, 0, frames))
    for first, *others in (places for count in (2, 3) for places in permutations(range(space.size), count)):
        if first < min(others):
            matrix, told = eye.clone(), ", ".join(names[i] for i in (first, *others))
            matrix[[first, *others]] = eye[[*others, first]]
            found.append(Meaning((("order", f"{told} are in each other's places"),), matrix))
    units: dict[tuple[str, int], dict[int, Conversion]] = {}
    for i, term in enumerate(space.terms):
        for source, conversions in enumerate((map(Conversion, FACTORS, FACTORS.values()), physical(term), PERCENT)):
            for conversion in conversions:
                units.setdefault((conversion.unit, source), {})[i] = conversion
    for (unit, _), of_unit in units.items():
        all_but_last = dict(list(of_unit.items())[:-1])  # the last is the gripper, whose unit is often another one
        for entries in filter(None, (of_unit, all_but_last, *({i: conversion} for i, conversion in of_unit.items()))):
            matrix, told = eye.clone(), ", ".join(names[i] for i in entries)
            for i, conversion in entries.items():
                matrix[i, i], matrix[i, -1] = conversion.scale, conversion.offset
            name, word = ("sign", "with") if unit == SIGN else ("units", "in")
            one = Meaning(((name, f"{told} {word} {unit}"),), matrix)
            if one.after(best).apply(action_ETA)[..., list(entries)].abs().max() <= 1 + ROUNDING:
                found.append(one)
    return [one.after(best) for one in found]
