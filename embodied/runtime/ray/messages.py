"""Messages between the controller and the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from embodied.core.algorithm import Metrics
from embodied.core.episodes import EpisodeStats
from embodied.runtime.ray.weights import Publication
from embodied.runtime.watch.track import Span


class ServerLost(Exception):
    """An env worker got no answer from its actor server. The fragment can go on with another one.

    cause: the exception of the server, or the reason why there is no answer.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sign of life of a part."""

    doing: str
    """Its present operation, or what it waits for."""
    done: int
    """Operations so far."""
    busy_s: float
    """Time in the present operation; 0 while it waits."""
    spans: Sequence[Span] = ()
    """Of its tracks since the last one, while a trace is recorded."""


@dataclass(frozen=True, slots=True)
class Built:
    """Facts about a part that is ready, for the controller."""

    node: str
    """Ray's id of its node."""
    pid: int
    """Id of its process there."""
    resumes_exactly: bool = True
    """Whether all its envs can be restored from a checkpoint; of env workers."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts about a fragment for the controller. Its tensors stay in the object store."""

    worker: int
    """Index of the env worker."""
    group: int
    """Index of the env group in its worker."""
    incarnation: int
    """Of the ticket."""
    sequence: int
    """Of the ticket."""
    num_env_steps: int
    """Control steps executed in it."""
    episodes: EpisodeStats
    """Episodes that ended in it."""
    totals: Mapping[str, float]
    """Totals of the track of this incarnation of the worker."""
    server_totals: Mapping[str, float]
    """Totals of the track of its actor server."""


@dataclass(frozen=True, slots=True)
class Delivery(Summary):
    """A fragment by reference, as it waits in the channel."""

    fragment: Any
    """Reference to the fragment."""

    @classmethod
    def of(cls, summary: Summary, fragment: Any) -> Delivery:
        """Add the reference to the summary."""
        return cls(**{field.name: getattr(summary, field.name) for field in fields(summary)}, fragment=fragment)


@dataclass(frozen=True, slots=True)
class Assisted:
    """Result of an update in a learner process other than the first one."""

    lost: float
    """Fragments of its share that were lost with their node."""
    totals: Mapping[str, float]
    """Totals of its track so far."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Result of an update, or of a publication without one."""

    metrics: Metrics
    """Of the algorithm."""
    publication: Publication
    """The new weights."""
    iteration: int
    """Batches consumed."""
    env_steps: int
    """Control steps consumed."""
    totals: Mapping[str, float]
    """Totals of its track so far."""
