"""What parts hand to each other: fragments in whole batches, weights with a version, and states of env groups.

    workers ── put(fragment) ──► Channel {sequence: fragment} ── take(version) ──► batch of exactly batch_fragments
    learner ── publish(v, state): copy, then swap one reference ──► WeightStore ◄── latest() ── actor, evaluator

The ledger bounds the channel, so ``put`` never blocks. With order=ticket, batch ``version`` consists of the tickets
``version * batch_fragments ...``. With order=arrival it is taken once any ``batch_fragments`` fragments are there, and
consists of those with the lowest numbers. Within a batch, fragments are sorted by worker and group.

The learner publishes version 0 before anything acts, then v+1 after its update on batch v (docs/architecture.md has a
timeline). Readers may keep what they read: it never changes. All versions share the frozen weights.
"""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


class Closed(Exception):
    """The channel is closed: nothing can be put or taken."""


class Channel:
    """Thread-safe buffer of fragments, or of references to fragments of other processes.

    batch_fragments, max_staleness: those of the ledger. order: see above.
    """

    def __init__(
        self, batch_fragments: int, max_staleness: int, order: Literal["ticket", "arrival"] = "ticket"
    ) -> None:
        self.batch_fragments, self.order = batch_fragments, order
        self.capacity = batch_fragments * (1 + max_staleness)
        self._fragments: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._learner = 0

    def __len__(self) -> int:
        return len(self._fragments)

    def put(self, fragment: Any) -> None:
        """Add a fragment that the ledger accepted. Raises Closed once the channel is closed."""
        with self._changed:
            if self._closed:
                raise Closed
            assert fragment.sequence not in self._fragments, f"fragment {fragment.sequence} was delivered twice"
            assert len(self._fragments) < self.capacity, "the ledger admitted more than its bound"
            self._fragments[fragment.sequence] = fragment
            self._changed.notify_all()

    def take(self, version: int, learner: int = 0) -> list[Any]:
        """Wait for batch ``version`` and take it. Closed once the channel is, or is emptied for another learner."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or learner != self._learner or self.has(version))
            if self._closed or learner != self._learner:
                raise Closed
            batch = [self._fragments.pop(number) for number in self._numbers(version)]
        return sorted(batch, key=lambda fragment: (fragment.worker, fragment.group, fragment.sequence))

    def has(self, version: int) -> bool:
        if len(self._fragments) < self.batch_fragments:
            return False
        return self.order == "arrival" or all(number in self._fragments for number in self._numbers(version))

    def empty(self, learner: int) -> None:
        """Drop all fragments, because the learner was lost; only its incarnation ``learner`` may take from now on."""
        with self._changed:
            self._fragments.clear()
            self._learner = learner
            self._changed.notify_all()

    def close(self) -> None:
        """End every present and future ``put`` and ``take`` by Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _numbers(self, version: int) -> Sequence[int]:
        """Return the tickets of batch ``version``, which is complete if order=arrival."""
        if self.order == "arrival":
            return sorted(self._fragments)[: self.batch_fragments]
        return range(version * self.batch_fragments, (version + 1) * self.batch_fragments)


class Snapshot:
    """States of env groups, each saved between two of its fragments. keys: worker and group of those to be saved."""

    def __init__(self, keys: Iterable[tuple[int, int]] = ()) -> None:
        self.states: dict[tuple[int, int], dict[str, Any] | None] = {}
        self.complete = threading.Event()
        self._keys = set(keys)

    def lacks(self, key: tuple[int, int]) -> bool:
        """Return whether a group is still to be saved."""
        return key in self._keys and key not in self.states

    def put(self, key: tuple[int, int], state: dict[str, Any] | None) -> None:
        """Keep the state of a group; None if its worker is not there."""
        self.states[key] = state
        if self.states.keys() == self._keys:
            self.complete.set()


@dataclass(frozen=True, slots=True)
class Weights:
    """One published version; read only."""

    version: int
    """Batches that the learner had consumed."""
    tensors: Mapping[str, Tensor]
    """By name, on the device of the policy that was published."""
    changed: Mapping[str, int]
    """Version that last changed each tensor: a reader with version v loads the tensors above v."""


class WeightStore:
    """Thread-safe holder of the newest weights."""

    def __init__(self) -> None:
        self._newest = Weights(-1, {}, {})

    @property
    def version(self) -> int:
        """Version of the newest weights; -1 if there are none."""
        return self._newest.version

    def publish(self, version: int, state: Mapping[str, Tensor], frozen: Collection[str] = ()) -> None:
        """Copy ``state`` (on its device) and make it the newest. Versions must not decrease.

        frozen: names of tensors that never change; they are shared, not copied.
        """
        newest = self._newest
        assert version >= newest.version, f"published {version} after {newest.version}"
        tensors, changed = {}, {}
        for name, tensor in state.items():
            if name in frozen and name in newest.tensors:
                tensors[name], changed[name] = newest.tensors[name], newest.changed[name]
            else:
                tensors[name], changed[name] = tensor.detach() if name in frozen else tensor.detach().clone(), version
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # readers use other streams
        self._newest = Weights(version, tensors, changed)

    def latest(self) -> Weights:
        """Return the newest weights; without tensors if there are none."""
        return self._newest
