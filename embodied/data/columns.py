"""Columns of a data set that are state and action, and the conversion of their numbers for a task (``data_keys``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied.core.errors import UserError, unknown_name
from embodied.core.options import Text, config_dataclass, from_mapping

NAMES = {"state": "observation.state", "action": "action"}
"""Usual names of the columns, as LeRobot has them."""


@config_dataclass
class Column:
    """Options of one column. An entry of the task is ``offset + scale * number``."""

    name: Text
    """Name of the column."""
    entries: tuple[str, ...] = ()
    """Names of the column's entries that the task uses, in the task's order; none: all entries in their order."""
    scale: tuple[float, ...] = ()
    """Factors: one for all entries, or one per entry; none: 1."""
    offset: tuple[float, ...] = ()
    """Numbers that are added: one for all entries, or one per entry; none: 0."""

    @property
    def converts(self) -> bool:
        """Whether the options state a conversion."""
        return bool(self.entries or self.scale or self.offset)


def columns_of(keys: Mapping[str, Any]) -> tuple[Column, Column]:
    """Return the columns of ``state`` and ``action`` for the option ``data_keys``: names, or the options of Column."""
    unknown = sorted(set(keys) - set(NAMES))
    if unknown:
        raise UserError(f"data_keys.{unknown[0]}: state and action can have other names in a data set, nothing else")
    columns = []
    for what, usual in NAMES.items():
        given = keys.get(what, {})
        if not isinstance(given, str | Mapping):
            raise UserError(f"data_keys.{what}: got {given!r}, allowed: a name, or name, entries, scale and offset")
        options = {"name": given} if isinstance(given, str) else {"name": usual, **given}
        columns.append(from_mapping(Column, options, f"data_keys.{what}"))
    state, action = columns
    return state, action


def convert(values_FD: Tensor, names: Sequence[str], column: Column, what: str) -> Tensor:
    """Convert the numbers of a column to entries of the task, [F, D'].

    names: of the column's entries. what: ``state`` or ``action``. UserError for an entry that the column lacks, and for
    a wrong number of factors.
    """
    if column.entries:
        for entry in column.entries:
            if entry not in names:
                raise unknown_name(f"entry of {column.name} in data_keys.{what}.entries", entry, names)
        values_FD = values_FD[:, [list(names).index(entry) for entry in column.entries]]
    scale, offset = factors(column, values_FD.shape[1], what)
    return (offset + scale * values_FD.double()).float()


def factors(column: Column, size: int, what: str) -> tuple[Tensor, Tensor]:
    """Return scale and offset of ``size`` entries, float64 [size]. UserError for a wrong number of them."""
    found = []
    for option, numbers, default in (("scale", column.scale, 1.0), ("offset", column.offset, 0.0)):
        if len(numbers) not in (0, 1, size):
            allowed = f"one number, or one for each of the {size} entries"
            raise UserError(f"data_keys.{what}.{option}: got {len(numbers)} numbers, allowed: {allowed}")
        found.append(torch.tensor(numbers or [default], dtype=torch.float64).repeat(size // (len(numbers) or 1)))
    scale, offset = found
    if bool((scale == 0).any()):
        raise UserError(f"data_keys.{what}.scale: got a 0, allowed: any other number")
    return scale, offset
