"""The newest weights, with a version. Readers pull; nobody waits for a reader.

    learner  ── publish(v, state): copy, then swap one reference ──►  store  ◄── latest() ── actor, evaluator

Timeline: the learner publishes 0 before anything acts, then v+1 after its update on batch v, and only after that does
the ledger count batch v as consumed: whoever is admitted by that finds the new weights. A published snapshot is never
written again, so readers may hold it for as long as they like. Normaliser statistics are buffers inside the state.
Frozen weights, which may be most of a large model, are copied once: all snapshots have the same tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


class WeightStore:
    """Thread-safe holder of one (version, state)."""

    def __init__(self) -> None:
        self._newest: tuple[int, dict[str, Tensor]] | None = None

    @property
    def version(self) -> int:
        """Of the newest weights; -1 before the first publish."""
        newest = self._newest
        return -1 if newest is None else newest[0]

    def publish(self, version: int, state: Mapping[str, Tensor], frozen: Collection[str] = ()) -> None:
        """Copy ``state`` (on its device) and make it the newest. Versions must not go back. frozen: names of what has
        not changed since the first publish."""
        assert version >= self.version, f"published {version} after {self.version}"
        kept = self._newest[1] if self._newest else {}
        copy = {
            name: kept[name] if name in frozen and name in kept else tensor.detach().clone()
            for name, tensor in state.items()
        }
        if any(tensor.is_cuda for tensor in copy.values()):
            torch.cuda.current_stream().synchronize()  # readers use other streams
        self._newest = (version, copy)

    def latest(self) -> tuple[int, dict[str, Tensor]]:
        """(version, state); read only. RuntimeError before the first publish."""
        newest = self._newest
        if newest is None:
            raise RuntimeError("no weights have been published yet")
        return newest
