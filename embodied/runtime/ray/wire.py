"""What travels between processes of Ray: tensors, errors, and weights through the object store.

    learner: WeightStore ── Publisher.put ──► Publication (version, references) ──► travels with tickets and requests
    actor server: PulledWeights.offer(publication) ── pull() fetches what it lacks ── latest() ──► ActorServer

Tensors are sent as numpy arrays, whose bytes the object store shares without a copy: a tensor that was received is to
be read only. Weights are put in groups of tensors that last changed in the same version (``Weights.changed``), each
checked by a digest. So frozen weights are put and pulled once, and a server that joins late gets every group.
"""

import asyncio
import hashlib
import warnings
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import ray
import ray.util
import torch
from ray.exceptions import ObjectLostError, OwnerDiedError, RayError, RayTaskError
from torch import Tensor

from embodied.core.errors import UserError
from embodied.runtime.channel import Weights, WeightStore

T = TypeVar("T")
Packed = tuple[np.ndarray[Any, Any], str]
"""Array, and the name of the tensor's dtype."""

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class PeerLost(Exception):
    """Another learner process died, or took no part in a sum for too long."""


def share_tensors() -> None:
    """Let this process send tensors as numpy arrays; any process can receive them."""
    ray.util.register_serializer(Tensor, serializer=pack, deserializer=unpack)


def pack(tensor: Tensor) -> Packed:
    values = tensor.detach().cpu().contiguous()
    name = str(values.dtype).removeprefix("torch.")
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy(), name


def unpack(packed: Packed) -> Tensor:
    array, name = packed
    dtype: torch.dtype = getattr(torch, name)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def nbytes(value: Any) -> int:
    """Return the bytes of all tensors in a tensor, mapping, sequence or dataclass; other values count nothing."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return sum(nbytes(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0


def own_cause(error: BaseException) -> BaseException:
    """Return what a part raised: a UserError itself, anything else with the traceback of its process."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
    return error


def is_fault(error: BaseException | None) -> bool:
    """Return whether a process, one that it works with or its cluster failed, and not the code that ran there."""
    return isinstance(error.cause if isinstance(error, RayTaskError) else error, RayError | PeerLost)


def value_of(future: Future[T]) -> T:
    """Return the result of a finished call, or raise ``own_cause`` of its error."""
    error = future.exception()
    if error is not None:
        raise own_cause(error)
    return future.result()


async def fetch(references: Sequence[Awaitable[T]]) -> list[T]:
    """Return the objects, in order, without those that no node has any more. ObjectLostError if that leaves none."""
    found = await asyncio.gather(*references, return_exceptions=True)
    kept = [value for value in found if not isinstance(value, BaseException)]
    for error in found:
        if isinstance(error, BaseException) and (not kept or not isinstance(error, ObjectLostError)):
            raise error
    return kept


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
    """The learner's end, which keeps the references of the newest version. learner: its incarnation."""

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
        """Fetch what is new; return its bytes. DamagedWeights if a digest differs, WeightsLost without its learner."""
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
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        array, dtype = pack(tensors[name])
        found.update(f"{name} {dtype} {array.shape} ".encode())
        found.update(array.data)
    return found.digest()
