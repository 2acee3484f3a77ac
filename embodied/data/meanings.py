"""What the numbers of a data set may be meant as, if they are shifted in time, or in another unit, order or sign."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied.core.spec import Box
from embodied.data.columns import ROUNDING, Conversion, columns_of, conversions, option_words
from embodied.data.faults import Fault

SIGN = Conversion("the other sign", -1.0)
MOVE = "frames[{0}] = frames.groupby('episode_index')[{0}].shift({1}).fillna(frames[{0}])"


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

    def faults(self, what: str, names: Sequence[str], keys: Mapping[str, Any], where: str) -> list[Fault]:
        """Return the faults of the column ``what``, state or action; each names what cures all. keys: ``data_keys``."""
        linear = self.matrix[:-1, :-1]
        order = linear.abs().argmax(1)
        scale = linear.gather(1, order[:, None])[:, 0]
        state, action = columns_of(keys)
        column = action if what == "action" else state
        options = option_words(what, column, names, order.tolist(), scale, self.matrix[:-1, -1])
        name, late = (action.name, self.shift) if self.shift else (state.name, self.state_shift)
        cures = {"shift": f"Record again, or change each file of data/ in pandas: {MOVE.format(repr(name), -late)}"}
        return [Fault(f"{what} {x}", True, told, where, cures.get(x, f"Give {options}")) for x, told in self.told]


def meanings(best: Meaning, space: Box, ends_2A: Tensor) -> list[Meaning]:
    """Return what recorded actions may be meant as, if they have one fault more than those that ``best`` undoes.

    ends_2A: the recorded minima and maxima.
    """
    names, eye, found = space.names, torch.eye(space.size + 1), list[Meaning]()
    for frames, late in ((1, "late"), (-1, "early")):
        found.append(Meaning((("shift", f"actions are one step {late}"),), eye, frames, 0))
        found.append(Meaning((("shift", f"states are one step {late}"),), eye, 0, frames))
    for first, *others in (places for count in (2, 3) for places in permutations(range(space.size), count)):
        if first < min(others):
            matrix, told = eye.clone(), ", ".join(names[i] for i in (first, *others))
            matrix[[first, *others]] = eye[[*others, first]]
            found.append(Meaning((("order", f"{told} are in each other's places"),), matrix))
    units: dict[str, dict[int, Conversion]] = {}
    lows, highs = best.apply(ends_2A).sort(0).values.tolist()
    for i, (term, low, high) in enumerate(zip(space.terms, lows, highs, strict=True)):
        for conversion in (SIGN, *conversions(term, low, high)):
            units.setdefault(conversion.unit, {})[i] = conversion
    for unit, of_unit in units.items():
        all_but_last = dict(list(of_unit.items())[:-1])  # the last is the gripper, whose unit is often another one
        for entries in filter(None, (all_but_last, of_unit, *({i: conversion} for i, conversion in of_unit.items()))):
            matrix, told = eye.clone(), ", ".join(names[i] for i in entries)
            for i, conversion in entries.items():
                matrix[i, i], matrix[i, -1] = conversion.scale, conversion.offset
            name, word = ("sign", "with") if unit == SIGN.unit else ("units", "in")
            one = Meaning(((name, f"{told} {word} {unit}"),), matrix)
            if one.after(best).apply(ends_2A)[:, list(entries)].abs().max() <= 1 + ROUNDING:
                found.append(one)
    return [one.after(best) for one in found]
