"""Weights through the object store: put once a version, pulled by whoever acts, checked by a digest.

    learner: WeightStore ── Publisher.put ──► Publication (version, references) ──► travels with tickets and requests
    actor server: PulledWeights.offer(publication) ── pull() fetches what it lacks ── latest() ──► ActorServer

A version is put in groups of tensors: those that have the same version since which they are unchanged
(``Weights.changed``). So frozen weights are put and pulled once, and a server that joins late gets every group.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import OwnerDiedError
from torch import Tensor

from embodied.runtime.ray.wire import nbytes, pack
from embodied.runtime.weight_store import Weights, WeightStore


class DamagedWeights(Exception):
    """Weights that were pulled are not those that were put."""


class WeightsLost(Exception):
    """The learner died before its weights were pulled. learner: its incarnation."""

    def __init__(self, learner: int) -> None:
        super().__init__(learner)
        self.learner = learner

    def __str__(self) -> str:
        return "its weights cannot be fetched any more, because its process died"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that last changed in the same version."""

    version: int
    """That version."""
    tensors: Any
    """Reference to the tensors by name."""
    digest: bytes
    """Of names, types, shapes and values."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version of the weights, by reference."""

    version: int
    """Batches that the learner had consumed."""
    groups: tuple[TensorGroup, ...]
    """All its tensors; where two groups have the same tensor, the later group has its value."""
    learner: int = 0
    """Incarnation of the learner. Two learners can publish the same version with other weights."""

    @property
    def age(self) -> tuple[int, int]:
        """Key that grows from one publication of a run to the next."""
        return self.learner, self.version


class Publisher:
    """The learner's end. It keeps the references of the newest version; older ones are freed with their last reader.

    learner: its incarnation.
    """

    def __init__(self, learner: int = 0) -> None:
        self.learner = learner
        self._groups: dict[int, TensorGroup] = {}

    def put(self, weights: Weights) -> Publication:
        """Put the tensors that changed, and return references to all."""
        groups: dict[int, dict[str, Tensor]] = {}
        for name, version in weights.changed.items():
            groups.setdefault(version, {})[name] = weights.tensors[name]
        kept = {}
        for version, tensors in sorted(groups.items()):
            if version in self._groups and version != weights.version:
                kept[version] = self._groups[version]
            else:
                kept[version] = TensorGroup(version, ray.put(tensors), digest(tensors))
        self._groups = kept
        return Publication(weights.version, tuple(kept.values()), self.learner)


class PulledWeights(WeightStore):
    """An actor server's end. learner: incarnation that published what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.learner = 0
        self._offered = Publication(-1, ())

    def offer(self, publication: Publication) -> None:
        """Take note of a publication; older ones are ignored. Nothing is fetched yet."""
        self._offered = max(self._offered, publication, key=lambda known: known.age)

    async def pull(self) -> int:
        """Fetch what is new, and return its bytes. All is new if another learner published it than before.

        DamagedWeights if a digest differs. WeightsLost if the learner has died.
        """
        offered, base = self._offered, self._newest
        if offered.age == (self.learner, base.version):
            return 0
        if offered.learner != self.learner:
            base = Weights(-1, {}, {})
        tensors, changed = dict(base.tensors), dict(base.changed)
        lacking = [group for group in offered.groups if group.version > base.version]
        try:
            fetched = await asyncio.gather(*(group.tensors for group in lacking))
        except OwnerDiedError:
            raise WeightsLost(offered.learner) from None
        for group, found in zip(lacking, fetched, strict=True):
            if digest(found) != group.digest:
                raise DamagedWeights(f"weights of version {group.version} do not have their digest")
            tensors |= found
            changed |= dict.fromkeys(found, group.version)
        self._newest, self.learner = Weights(offered.version, tensors, changed), offered.learner
        new = {group.version for group in lacking}
        return sum(nbytes(tensors[name]) for name, version in changed.items() if version in new)


def digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a digest of tensors by name."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        array, dtype = pack(tensors[name])
        found.update(f"{name} {dtype} {array.shape} ".encode())
        found.update(array.data)
    return found.digest()
