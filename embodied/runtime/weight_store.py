"""Store of the newest weights, with a version. Readers pull; the learner never waits for readers.

    learner  ── publish(v, state): copy, then swap one reference ──►  store  ◄── latest() ── actor, evaluator

Timeline: the learner publishes 0 before anything acts, then v+1 after its update on batch v. Only then does the ledger
count batch v as consumed, so a fragment that is admitted by that gets the new weights. Readers may keep a snapshot: it
never changes. Normaliser statistics are buffers inside the state. All snapshots share the frozen weights.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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

        frozen: names of tensors that have not changed since the first publication.
        """
        newest = self._newest
        assert version >= newest.version, f"published {version} after {newest.version}"
        tensors, changed = {}, {}
        for name, tensor in state.items():
            if name in frozen and name in newest.tensors:
                tensors[name], changed[name] = newest.tensors[name], newest.changed[name]
            else:
                tensors[name], changed[name] = tensor.detach().clone(), version
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # readers use other streams
        self._newest = Weights(version, tensors, changed)

    def latest(self) -> Weights:
        """Return the newest weights; without tensors if there are none."""
        return self._newest
