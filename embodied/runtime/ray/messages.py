"""Messages between the controller and the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodied.core.episodes import EpisodeStats
from embodied.core.protocols import Metrics
from embodied.runtime.ray.weights import Publication
from embodied.runtime.watch.track import Span


class ServerLost(Exception):
    """An env worker got no answer from its actor server. The fragment can go on with another one.

    cause: what the server raised, or why there is no answer.
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
    """What the controller must know of a part that is ready."""

    node: str
    """Ray's id of its node."""
    pid: int
    """Id of its process there."""
    resumes_exactly: bool = True
    """Whether all its envs can be restored from a checkpoint; of env workers."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What the controller must know of a fragment, whose tensors stay in the object store."""

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
    """What the track of this incarnation of the worker has counted."""
    server_totals: Mapping[str, float]
    """What the track of its actor server has counted."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A fragment by reference, as it waits in the channel."""

    summary: Summary
    """What is known of it."""
    fragment: Any
    """Reference to the fragment."""

    @property
    def worker(self) -> int:
        """Index of the env worker."""
        return self.summary.worker

    @property
    def group(self) -> int:
        """Index of the env group in its worker."""
        return self.summary.group

    @property
    def sequence(self) -> int:
        """Number of its ticket."""
        return self.summary.sequence

    @property
    def num_env_steps(self) -> int:
        """Control steps executed in it."""
        return self.summary.num_env_steps

    @property
    def episodes(self) -> EpisodeStats:
        """Episodes that ended in it."""
        return self.summary.episodes


@dataclass(frozen=True, slots=True)
class Assisted:
    """What a learner process beside the first one says of an update."""

    lost: float
    """Fragments of its share that were lost with their node."""
    totals: Mapping[str, float]
    """What its track has counted so far."""


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
    """What its track has counted so far."""
