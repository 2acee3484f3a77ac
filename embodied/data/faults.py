"""Faults of demonstrations: those that their numbers alone show, and what the numbers may be meant as.

They may be shifted in time, or in another unit, order or sign.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied.core.spec import Box, EnvSpec
from embodied.data.columns import ROUNDING, Conversion, columns_of, conversions, option_words
from embodied.data.demonstrations import Demonstrations

UNEVEN = 0.25  # error of the time between two frames that neither rounding nor a clock explains, control steps
RARE = 0.01  # share of frames that imitation bears
LISTED = 5  # things in a message
SIGN = Conversion("the other sign", -1.0)
MOVE = "frames[{0}] = frames.groupby('episode_index')[{0}].shift({1}).fillna(frames[{0}])"


class Fault(NamedTuple):
    """One fault. serious: imitation will probably fail because of it."""

    name: str
    serious: bool
    what: str
    where: str
    cure: str

    def __str__(self) -> str:
        return f"{'FAULT' if self.serious else 'doubt'} {self.name}: {self.what}; {self.where}. {self.cure}".strip()


def listed(things: Sequence[Any]) -> str:
    more = f" and {len(things) - LISTED} more" if len(things) > LISTED else ""
    return ", ".join(map(str, things[:LISTED])) + more


def check_frames(data: Demonstrations, time_F1: Tensor | None, spec: EnvSpec) -> list[Fault]:
    """Return faults of times (s), lengths and images, and entries that never vary."""
    episodes, lengths = data.episode_F.unique_consecutive(return_counts=True)
    limit, dt = spec.max_episode_steps, 1 / data.control_hz
    time_F = torch.arange(len(data.episode_F)) * dt if time_F1 is None else time_F1[:, 0]
    uneven_F = ((time_F.double().diff() / dt - 1).abs() > UNEVEN) & (data.episode_F.diff() == 0)
    short, long, uneven = episodes[lengths == 1], episodes[lengths > limit], uneven_F.nonzero()[:, 0]
    found = list[Fault]()

    def check(name: str, serious: bool, at: list[Any], what: str, cure: str) -> None:
        if at:
            found.append(Fault(name, serious, f"{what}: {len(at)}", listed(at), cure))

    often = len(uneven) > RARE * len(time_F)
    cure = "Sample at that rate, or if a robot waited there for its policy, record with schedule=rtc"
    check("time stamps", often, uneven.tolist(), f"frames that are not {dt:g} s before the next", cure)
    check("one frame", False, short.tolist(), "episodes of one frame", "Check where episodes end")
    cure = f"Give task.max_episode_steps={int(lengths.max())}, or cut them"
    check("time limit", False, long.tolist(), f"episodes longer than the time limit of {limit} steps", cure)
    names, values = (*spec.state_names, *spec.action_names), torch.cat((data.state_FS, data.action_FA), 1)
    still = [names[i] for i in (values == values[:1]).all(0).nonzero()[:, 0]]
    check("constant", False, still, "entries that never vary", "Check that they were recorded")
    for camera, images in data.images.items():
        flat = (images.flatten(1, 2) == images[:, :1, 0]).flatten(1).all(1).nonzero()[:, 0].tolist()
        frozen = [camera] if len(images) > 1 and bool((images == images[:1]).all()) else []
        check("images", True, flat, f"images of camera {camera} that are black or of one colour", "Check it")
        check("images", True, frozen, "cameras that show one image in all frames", "Check that they were running")
    return found


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
