"""Columns of a data set that are state and action: conversion for a task (``data_keys``), and a check of their units.

Actions outside the action space are refused, with the ``data_keys`` that convert them. A line names entries that use
only a small part of the space, states that are implausibly large for their unit, and entries for which the data set
states another unit.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.core.options import Text, config_dataclass, from_mapping
from embodied.core.spec import ActionTerm, Box, EnvSpec, Term

NAMES = {"state": "observation.state", "action": "action"}  # usual names of the columns, as LeRobot has them
IMAGES = "observation.images"  # before the name of a camera
ROUNDING = 1e-3  # how far an action may be beyond the space
SMALL = 0.1  # share of the space; an entry that uses less may be in another unit
PLAUSIBLE = {"rad": 2 * math.pi, "m": 10.0, "rad/s": 20.0, "m/s": 10.0}  # largest states, by unit
INSTEAD = {"rad": {"degrees": math.pi / 180}, "m": {"mm": 1e-3, "cm": 1e-2}}  # other units, and their sizes
INSTEAD |= {f"{unit}/s": {f"{one}/s": size for one, size in others.items()} for unit, others in INSTEAD.items()}
IF_SO = ". If so, give "  # before options that follow from a guess


class Unfit(UserError):
    """Raised for numbers of a data set that no policy can learn from, although their names are those of the task."""

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(f"{what}. {cure}" if cure else what)
        self.what, self.cure = what, cure


@config_dataclass
class Column:
    """Options of one column. An entry of the task is ``offset + scale * number``."""

    name: Text
    entries: tuple[str, ...] = ()
    """Names of the column's entries that the task uses, in the task's order; none: all entries in their order."""
    scale: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    """Factors, and numbers that are added: one for all entries, or one per entry; none: 1 and 0."""

    @property
    def converts(self) -> bool:
        """Whether the options state a conversion."""
        return bool(self.entries or self.scale or self.offset)


def columns_of(keys: Mapping[str, Any]) -> tuple[Column, Column]:
    """Return the columns of ``state`` and ``action`` for the option ``data_keys``: names, or the options of Column."""
    unknown = sorted(set(keys) - {*NAMES, "images"})
    if unknown:
        raise UserError(f"data_keys.{unknown[0]}: state, action and images can have other names in a data set")
    images = keys.get("images", {})
    if not isinstance(images, Mapping) or not all(isinstance(name, str) for name in images.values()):
        raise UserError(f"data_keys.images: got {images!r}, needed: data_keys.images.<camera>=<column>")
    columns = []
    for what, usual in NAMES.items():
        given = keys.get(what, {})
        options = {"name": given} if isinstance(given, str) else given
        if not isinstance(options, Mapping):
            raise UserError(f"data_keys.{what}: got {given!r}, allowed: a name, or name, entries, scale and offset")
        columns.append(from_mapping(Column, {"name": usual, **options}, f"data_keys.{what}"))
    return columns[0], columns[1]


def of_camera(camera: str, keys: Mapping[str, Any]) -> str:
    """Return the column of a camera's images for the option ``data_keys``: ``images.<camera>``, if it is given."""
    return str(keys.get("images", {}).get(camera, f"{IMAGES}.{camera}"))


def convert(values_FD: Tensor, names: Sequence[str], column: Column, key: str) -> Tensor:
    """Convert the numbers of a column to entries of the task, [F, D'].

    names: of the column's entries; without any they are called 0, 1 and so on. key: of the column's options, such as
    ``data_keys.action``. UserError for an entry that the column lacks, and for a wrong number of factors.
    """
    if column.entries:
        names = list(names) or [str(i) for i in range(values_FD.shape[1])]
        for entry in column.entries:
            if entry not in names:
                raise unknown_name(f"entry of {column.name} in {key}.entries", entry, names)
        values_FD = values_FD[:, [names.index(entry) for entry in column.entries]]
    scale, offset = factors(column, values_FD.shape[1], key)
    return (offset + scale * values_FD.double()).float()


def factors(column: Column, size: int, key: str) -> tuple[Tensor, Tensor]:
    """Return scale and offset of ``size`` entries, float64 [size]. UserError for a wrong number of them."""
    found = []
    for option, numbers, default in (("scale", column.scale, 1.0), ("offset", column.offset, 0.0)):
        if len(numbers) not in (0, 1, size):
            allowed = f"one number, or one for each of the {size} entries"
            raise UserError(f"{key}.{option}: got {len(numbers)} numbers, allowed: {allowed}")
        found.append(torch.tensor(numbers or [default], dtype=torch.float64).repeat(size // (len(numbers) or 1)))
    scale, offset = found
    if bool((scale == 0).any()):
        raise UserError(f"{key}.scale: got a 0, allowed: any other number")
    return scale, offset


class Conversion(NamedTuple):
    """``offset + scale * number``, for a number in ``unit``."""

    unit: str
    scale: float
    offset: float = 0.0


def unit_of(term: Term | ActionTerm) -> str:
    """Describe the number 1 of an entry: ``1 rad``, ``0.06 m``, ``0.02 m from 0.02``; empty without a unit."""
    one, start = (1 / term.scale, 0.0) if isinstance(term, Term) else (term.scale, term.offset)
    if (one, start, term.unit) == (1.0, 0.0, ""):
        return ""
    return f"{one:g} {term.unit}".strip() + (f" from {start:g}" if start else "")


def state_units(spec: EnvSpec) -> tuple[str, ...]:
    """Return ``unit_of`` of every entry of the state."""
    return tuple(unit_of(term) for term in spec.state for _ in range(term.size))


def action_units(spec: EnvSpec) -> tuple[str, ...]:
    """Return ``unit_of`` of every entry of an action; () for choices."""
    return tuple(map(unit_of, spec.action.terms)) if isinstance(spec.action, Box) else ()


def check_actions(action_FA: Tensor, spec: EnvSpec, column: Column, path: Path, says_units: bool = False) -> list[str]:
    """Return a line if entries use less than SMALL of the space, or may be in an environment's own unit.

    UserError beyond the space. column: conversion so far. says_units: the data set states units.
    """
    if not isinstance(spec.action, Box):
        return []
    beyond: dict[int, Conversion | None] = {}
    small: dict[int, Conversion | None] = {}
    own: dict[int, Conversion | None] = {}
    may_be_own = not (says_units or column.scale or column.offset)
    ranges = _ranges(action_FA)
    in_own_unit = [(physical(term) or [Conversion("", 1.0)])[0] for term in spec.action.terms]  # none: it cannot move
    all_own = all(_size(one, ends) <= 1 + ROUNDING for one, ends in zip(in_own_unit, ranges, strict=True))
    for i, (term, (low, high)) in enumerate(zip(spec.action.terms, ranges, strict=True)):
        if (size := max(-low, high)) > 1 + ROUNDING:
            *usual, _, largest = conversions(term, low, high)
            beyond[i] = _fitting((low, high), usual) or largest
        elif 0 < size < SMALL:
            small[i] = _fitting((low, high), physical(term))
        elif term.offset and max(abs(low), abs(high - 1)) < SMALL:  # a position, not a step
            small[i] = Conversion("numbers from 0 to 1; if from 1 to 0, scale -2 and offset 1", 2.0, -1.0)
        elif may_be_own and not term.unit and (term.scale, term.offset) != (1, 0):
            own[i] = _fitting((low, high), physical(term)[:1])
    own = {i: conversion for i, conversion in own.items() if conversion}
    if beyond and all_own:  # one unit for all is likelier than one for each
        beyond = {i: one for i, one in enumerate(in_own_unit) if (one.scale, one.offset) != (1, 0)}
    described = _described(beyond or small or own, spec.action_names, action_FA, column, "action")
    where = f"data set {path}: its action"
    if beyond:
        raise Unfit(f"{where} goes beyond -1 to 1, which is all that task {spec.task} allows: {described}")
    if small and not says_units:
        return [f"{where} uses a small part of -1 to 1, as if it had another unit: {described}"]
    read = "states no unit, so -1 to 1 is read as the whole range. It may be in the environment's own unit"
    return [f"{where} {read}: {described}"] if own else []


def check_state(state_FS: Tensor, spec: EnvSpec, column: Column, path: Path) -> list[str]:
    """Return a line if entries are larger than is plausible. column: how the state was converted already."""
    first, large = 0, dict[int, Conversion | None]()
    for term in spec.state:
        entries = range(first, first := first + term.size)
        if state_FS[:, entries].abs().max() > term.scale * PLAUSIBLE.get(term.unit, math.inf):
            unit, size = next(iter(INSTEAD[term.unit].items()))
            large |= dict.fromkeys(entries, Conversion(unit, term.scale * size))
    described = _described(large, spec.state_names, state_FS, column, "state")
    return [f"data set {path}: its state is too large for the task's units: {described}"] if large else []


def check_units(found: Sequence[str], needed: Sequence[str], names: Sequence[str], what: str, path: Path) -> list[str]:
    """Return a line if the data set states other units than the task's."""
    other = [
        f"{name} {theirs}, not {ours}"
        for name, theirs, ours in zip(names, found, needed, strict=False)
        if theirs and ours and theirs != ours
    ]
    differ = f"data set {path}: 1 is something else in its {what} than in the task's: {'; '.join(other)}"
    cure = f"To convert it, give data_keys.{what}.scale=[...] and data_keys.{what}.offset=[...]"
    return [f"{differ}. {cure}"] if other else []


def physical(term: ActionTerm) -> list[Conversion]:
    """Return the conversions of the commanded quantity, in its own unit and in another one, to an action."""
    units = {term.unit or "the environment's unit": 1.0, **INSTEAD.get(term.unit, {})}
    return [Conversion(unit, one / term.scale, -term.offset / term.scale) for unit, one in units.items() if term.scale]


def conversions(term: ActionTerm, low: float, high: float) -> list[Conversion]:
    """Return the conversions to an action that numbers from ``low`` to ``high`` may need, usual ones first.

    The last two bring the numbers to all of -1 to 1; those of a step, a quantity without offset, keep its zero.
    """
    size, text = max(-low, high) or 1.0, "numbers from {:g} to {:g} for -1 to 1"
    first, last = (low, high) if term.offset and low < high else (-size, size)
    ranges = ((0, 1), (1, 0), (0, 100), (100, 0), (last, first), (first, last))
    linear = [Conversion(text.format(a, b), 2 / (b - a), (a + b) / (a - b)) for a, b in ranges]
    return [*physical(term), Conversion("percent", 0.01), *linear]


def option_words(
    what: str, column: Column, names: Sequence[str], order: Sequence[int], scale: Tensor, offset: Tensor
) -> str:
    """Return words for a shell: options that convert a column further than its own, whose place they take.

    Entry i becomes ``offset[i] + scale[i] * number`` of what is entry ``order[i]`` with its own options.
    """
    own_scale, own_offset = factors(column, len(order), f"data_keys.{what}")
    scale, offset = scale * own_scale[order], offset + scale * own_offset[order]
    words = [
        f"{name}=[{','.join(f'{x:.6g}' for x in numbers.tolist())}]"
        for name, numbers, usual in (("scale", scale, 1), ("offset", offset, 0))
        if getattr(column, name) or (numbers != usual).any()
    ]
    if list(order) != sorted(order):
        words.insert(0, "entries=" + json.dumps([(column.entries or names)[i] for i in order], separators=(",", ":")))
    return " ".join(shlex.quote(f"data_keys.{what}.{word}") for word in words)


def _ranges(values_FD: Tensor) -> list[tuple[float, float]]:
    return list(zip(values_FD.amin(0).tolist(), values_FD.amax(0).tolist(), strict=True))


def _size(conversion: Conversion, ends: tuple[float, float]) -> float:
    """Return the largest absolute value that a conversion makes of a range."""
    return max(abs(conversion.offset + conversion.scale * end) for end in ends)


def _fitting(ends: tuple[float, float], tried: Sequence[Conversion]) -> Conversion | None:
    """Return the conversion that brings a range into the space and uses most of it; None if none uses SMALL of it."""
    sizes = {one: _size(one, ends) for one in tried}
    fitting = [one for one, size in sizes.items() if SMALL <= size <= 1 + ROUNDING]
    return max(fitting, key=lambda one: abs(one.scale), default=None)


def _described(
    entries: Mapping[int, Conversion | None], names: Sequence[str], values_FD: Tensor, column: Column, what: str
) -> str:
    """Return the entries with their ranges and fitting units, and options that convert them besides ``column``."""
    ranges, listed = _ranges(values_FD), []
    scale, offset = factors(Column(what), len(ranges), what)
    for i, conversion in entries.items():
        listed.append("{} from {:.4g} to {:.4g}".format(names[i], *ranges[i]))
        if conversion is not None:
            listed[-1] += f" ({conversion.unit}?)"
            scale[i], offset[i] = conversion.scale, conversion.offset
    options = option_words(what, column, names, range(len(ranges)), scale, offset)
    return ", ".join(listed) + (IF_SO + options if any(entries.values()) else "")
