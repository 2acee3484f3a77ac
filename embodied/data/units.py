"""Check that the numbers of a data set have the units of a task, and suggest ``data_keys`` that convert them.

Actions outside the action space are refused. A line names entries that use only a small part of the space, states that
are implausibly large for their unit, and entries for which the data set states another unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Box, EnvSpec, Term
from embodied.data.columns import Column, factors

ROUNDING = 1e-3  # how far an action may be beyond the space
SMALL = 0.1  # share of the space; an entry that uses less may be in another unit
PLAUSIBLE = {"rad": 2 * math.pi, "m": 10.0}  # largest states, by unit
INSTEAD = {"rad": ("degrees", math.pi / 180), "m": ("mm", 1e-3)}  # other units that data sets have, and their sizes


class Conversion(NamedTuple):
    """``offset + scale * number``, for a number in ``unit``."""

    unit: str
    scale: float
    offset: float = 0.0


PERCENT = (Conversion("percent", 0.01), Conversion("percent from 0 to 100", 0.02, -1.0))


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


def check_actions(action_FA: Tensor, spec: EnvSpec, column: Column, path: Path) -> list[str]:
    """Return a line if entries use less than SMALL of the space. UserError for actions beyond it.

    column: how the actions were converted already.
    """
    if not isinstance(spec.action, Box):
        return []
    ranges = _ranges(action_FA)
    sizes = [max(-low, high) for low, high in ranges]
    terms, size = dict(enumerate(spec.action.terms)), len(ranges)
    beyond = {
        i: _fitting(ranges[i], (*_units(terms[i]), *PERCENT, Conversion("shares of the largest", 1 / sizes[i])))
        for i in terms
        if sizes[i] > 1 + ROUNDING
    }
    if beyond:
        raise UserError(
            f"data set {path}: its action goes beyond -1 to 1, which is all that task {spec.task} allows: "
            f"{_listed(beyond, spec.action_names, ranges)}. To convert it: {_options(beyond, size, column, 'action')}"
        )
    small = {i: _fitting(ranges[i], _units(terms[i])) for i in terms if 0 < sizes[i] < SMALL}
    if not small:
        return []
    hint = f". To convert it: {_options(small, size, column, 'action')}" if any(small.values()) else ""
    return [
        f"data set {path}: its action uses less than a tenth of -1 to 1, as if it had another unit: "
        f"{_listed(small, spec.action_names, ranges)}{hint}"
    ]


def check_state(state_FS: Tensor, spec: EnvSpec, column: Column, path: Path) -> list[str]:
    """Return a line if entries are larger than is plausible. column: how the state was converted already."""
    ranges = _ranges(state_FS)
    terms = [term for term in spec.state for _ in range(term.size)]
    large = {
        i: Conversion(INSTEAD[term.unit][0], term.scale * INSTEAD[term.unit][1])
        for i, term in enumerate(terms)
        if max(-ranges[i][0], ranges[i][1]) > term.scale * PLAUSIBLE.get(term.unit, math.inf)
    }
    if not large:
        return []
    return [
        f"data set {path}: its state is too large for the task's units: {_listed(large, spec.state_names, ranges)}. "
        f"To convert it: {_options(large, len(ranges), column, 'state')}"
    ]


def check_units(found: Sequence[str], needed: Sequence[str], names: Sequence[str], what: str, path: Path) -> list[str]:
    """Return a line if the data set states other units than the task's."""
    other = [
        f"{name} {theirs}, not {ours}"
        for name, theirs, ours in zip(names, found, needed, strict=False)
        if theirs and ours and theirs != ours
    ]
    if not other:
        return []
    return [
        f"data set {path}: 1 is something else in its {what} than in the task's: {'; '.join(other)}. To convert it: "
        f"data_keys.{what}.scale=[...] data_keys.{what}.offset=[...]"
    ]


def _ranges(values_FD: Tensor) -> list[tuple[float, float]]:
    """Return the lowest and the highest number of every entry."""
    return list(zip(values_FD.amin(0).tolist(), values_FD.amax(0).tolist(), strict=True))


def _units(term: ActionTerm) -> list[Conversion]:
    """Return the conversions of the commanded quantity, in its own unit and in another one."""
    if not term.scale:
        return []
    sizes = [(term.unit or "the environment's unit", 1.0), *([INSTEAD[term.unit]] if term.unit in INSTEAD else [])]
    return [Conversion(unit, one / term.scale, -term.offset / term.scale) for unit, one in sizes]


def _fitting(ends: tuple[float, float], conversions: Sequence[Conversion]) -> Conversion | None:
    """Return the first conversion that brings a range into the space without using less than SMALL of it."""
    for conversion in conversions:
        if SMALL <= max(abs(conversion.offset + conversion.scale * end) for end in ends) <= 1 + ROUNDING:
            return conversion
    return None


def _listed(
    entries: Mapping[int, Conversion | None], names: Sequence[str], ranges: Sequence[tuple[float, float]]
) -> str:
    """Return the entries with their ranges and the units that would fit."""
    guesses = {i: f" ({conversion.unit}?)" if conversion else "" for i, conversion in entries.items()}
    return ", ".join(f"{names[i]} from {ranges[i][0]:.4g} to {ranges[i][1]:.4g}{guess}" for i, guess in guesses.items())


def _options(entries: Mapping[int, Conversion | None], size: int, column: Column, what: str) -> str:
    """Return the options that convert these entries in addition to ``column``."""
    scale, offset = factors(column, size, what)
    for i, conversion in entries.items():
        if conversion is not None:
            scale[i], offset[i] = conversion.scale * scale[i], conversion.scale * offset[i] + conversion.offset
    options = {"scale": scale, "offset": offset}
    return " ".join(
        f"data_keys.{what}.{name}=[{','.join(f'{number:.6g}' for number in numbers.tolist())}]"
        for name, numbers in options.items()
        if name == "scale" or bool(numbers.any())
    )
