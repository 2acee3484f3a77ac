"""What the controller knows of env groups and of the processes of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied.runtime.ledger import Ticket
from embodied.runtime.ray.messages import Built


@dataclass(slots=True)
class Slot:
    """An env group."""

    worker: int
    """Index of its worker."""
    group: int
    """Index in its worker."""
    ticket: Ticket | None = None
    """Of its present fragment; None between two fragments."""
    calling: bool = False
    """Whether its worker has a call for it."""

    @property
    def key(self) -> tuple[int, int]:
        """Worker and group."""
        return self.worker, self.group


@dataclass(slots=True)
class Part:
    """The present process of a part."""

    incarnation: int
    """How often the part was replaced before."""
    handle: Any
    """Ray's handle of the actor."""
    built: Built | None = None
    """What it said when it was ready; None before."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """What its track has counted (``Track.totals``), as of the last fragment."""

    @property
    def node(self) -> str | None:
        """Ray's id of its node; None before it is ready."""
        return None if self.built is None else self.built.node
