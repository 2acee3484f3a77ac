"""Acts for many env groups with one copy of the policy.

    requests ──► concatenate ──► newest weights ──► policy.act, policy.value ──► split, stamp version ──► replies

Requests are merged into one batch, since a network's cost hardly depends on the batch's size; where results must not
depend on timing (max_staleness=0) each request is a batch of its own, because a matrix product may round differently
for another batch size. Weights are pulled between batches, never pushed into one: ``version_N`` says which were used.
On a GPU, inputs go through pinned memory and the results come back with one synchronisation, all on a stream of the
server's own, beside the learner's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embodied.core.protocols import Policy, Precomputing
from embodied.core.types import Obs, PolicySample
from embodied.runtime.messages import ActReply, ActRequest
from embodied.runtime.weight_store import WeightStore


class ActorServer:
    """policy: a copy that nobody else touches; moved to ``device``. merge: all requests in one batch."""

    def __init__(self, policy: Policy, store: WeightStore, device: torch.device, merge: bool) -> None:
        assert isinstance(policy, nn.Module)
        policy.to(device).eval()
        self.policy: Policy = policy
        self.store = store
        self.device = device
        self.merge = merge
        self.version = -1
        self._loaded: dict[str, Tensor] = {}
        self.infer_s = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def act(self, requests: Sequence[ActRequest]) -> list[ActReply]:
        """One reply for each request, in order, with CPU tensors. RuntimeError before any weights were published."""
        began = time.perf_counter()
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            if self.store.version > self.version:
                self._take_newest()
            batches = [requests] if self.merge else [[request] for request in requests]
            replies = [reply for batch in batches for reply in self._serve(batch)]
        self.infer_s += time.perf_counter() - began
        return replies

    def _take_newest(self) -> None:
        """Load those of the newest weights that are others than those loaded before."""
        self.version, state = self.store.latest()
        changed = {name: tensor for name, tensor in state.items() if tensor is not self._loaded.get(name)}
        self.policy.load_state_dict(changed, strict=not self._loaded)
        self._loaded = state

    def _serve(self, requests: Sequence[ActRequest]) -> list[ActReply]:
        """One call of ``Policy.act`` for all who want actions, one of ``Policy.value`` for all who want values."""
        acting = [request for request in requests if request.noise is not None]
        valued = [request.obs for request in requests if request.noise is None]
        valued += [request.final_obs for request in requests if request.final_obs is not None]
        samples = iter(self._samples(acting))
        values = iter(self._values(valued))
        state_values = [None if request.noise is not None else next(values) for request in requests]
        final_values = [None if request.final_obs is None else next(values) for request in requests]
        return [
            ActReply(request.worker, request.group, *(next(samples) if value is None else (None, None)), value, final)
            for request, value, final in zip(requests, state_values, final_values, strict=True)
        ]

    def _samples(self, requests: Sequence[ActRequest]) -> list[tuple[PolicySample, Obs | None]]:
        """What each request gets, and what the learner gets of its observations if they are precomputed here."""
        if not requests:
            return []
        noise = self._to_device([request.noise for request in requests if request.noise is not None])
        obs, computed = self._merge([request.obs for request in requests]), {}
        if isinstance(self.policy, Precomputing) and self.policy.precompute_in_actor:
            obs = computed = self.policy.precompute(obs)
        sample = self.policy.act(obs, noise)
        drawn = [sample.action_NHA, sample.log_prob_N, sample.value_N, sample.chain]
        columns = self._to_host([*drawn, *computed.values()])
        columns.insert(len(drawn), torch.full((len(noise),), self.version, dtype=torch.int64))
        sizes = [_rows(request.obs) for request in requests]
        rows = zip(*(column.split(sizes) for column in columns), strict=True)
        return [(PolicySample(*parts[:5]), dict(zip(computed, parts[5:], strict=True)) or None) for parts in rows]

    def _values(self, parts: Sequence[Obs]) -> list[Tensor]:
        if not parts:
            return []
        (values,) = self._to_host([self.policy.value(self._merge(parts))])
        return list(values.split([_rows(obs) for obs in parts]))

    def _merge(self, parts: Sequence[Obs]) -> Obs:
        return {key: self._to_device([obs[key] for obs in parts]) for key in parts[0]}

    def _to_device(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return rows if self._stream is None else rows.pin_memory().to(self.device, non_blocking=True)

    def _to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._stream is None:
            return list(tensors)
        host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for destination, source in zip(host, tensors, strict=True):
            destination.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return host


def _rows(obs: Obs) -> int:
    return next(iter(obs.values())).shape[0]
