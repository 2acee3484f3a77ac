"""Actor server: draws the actions of many env groups with one copy of the policy.

    requests ──► concatenate ──► newest weights ──► policy.act, policy.value ──► split, stamp version ──► replies

Requests are merged into one batch, because the cost of a forward pass hardly depends on the batch size. With
max_staleness=0, where results must not depend on timing, each request is a batch of its own: a matrix product may
round differently for another batch size. Weights are pulled between two batches; ``version_N`` is the version that
drew the actions.

On a GPU the server has a stream of its own. Inputs go through pinned memory, and results come back with one
synchronisation. Not if the simulator is on the same device (``resident``): all parts then use the default stream, which
keeps their order, and only noise and the numbers of decisions travel between device and CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.types import Obs, PolicySample
from embodied.runtime.collecting.messages import ActReply, ActRequest
from embodied.runtime.watch.track import Track
from embodied.runtime.weight_store import WeightSource


class ActorServer:
    """Draws actions and values for the requests of env groups.

    policy: a copy that no other part uses; it is moved to ``device``. merge: put all requests into one batch.
    index: of the server. resident: observations come from ``device``, and actions, chains and observations stay on it.
    ``track`` also counts how many requests were served together (``requests/<n>``).
    """

    def __init__(
        self,
        policy: Policy,
        store: WeightSource,
        device: torch.device,
        merge: bool,
        index: int = 0,
        resident: bool = False,
    ) -> None:
        self.policy = policy.to(device).eval()
        self.store = store
        self.device = device
        self.merge = merge
        self.version = -1
        self.track = Track(f"actor server {index}", "wait_requests")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not resident else None

    @torch.no_grad()
    def act(self, requests: Sequence[ActRequest]) -> list[ActReply]:
        """Return one reply per request, in order. RuntimeError before the first publication."""
        self.track.add(f"requests/{len(requests)}")
        stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with self.track.during("infer"), stream:
            if self.store.version > self.version:
                with self.track.during("fetch"):
                    self._take_newest()
            batches = [requests] if self.merge else [[request] for request in requests]
            return [reply for batch in batches for reply in self._serve(batch)]

    def totals(self) -> dict[str, float]:
        """Return the seconds of each activity and the counts so far (``Track.totals``)."""
        return self.track.totals()

    def forget(self) -> None:
        """Load all tensors at the next ``act``, because the weights are of another learner, with other versions."""
        self.version = -1

    def _take_newest(self) -> None:
        """Load the tensors of the newest weights that have changed since the loaded version."""
        weights = self.store.latest()
        changed = {name: weights.tensors[name] for name, since in weights.changed.items() if since > self.version}
        self.policy.load_state_dict(changed, strict=self.version < 0)
        if self._stream is not None:
            for tensor in changed.values():
                tensor.record_stream(self._stream)  # the store may drop it before the copy is done
        self.version = weights.version

    def _serve(self, requests: Sequence[ActRequest]) -> list[ActReply]:
        """Answer all requests with one call of ``Policy.act`` and one of ``Policy.value``."""
        acting = [request for request in requests if request.noise is not None]
        valued = [request.obs for request in requests if request.noise is None]
        valued += [request.final_obs for request in requests if request.final_obs is not None]
        samples = iter(self._samples(acting))
        values = iter(self._values(valued))
        states = [None if request.noise is not None else next(values) for request in requests]
        finals = [(None, None) if request.final_obs is None else next(values) for request in requests]
        replies = []
        for request, state, final in zip(requests, states, finals, strict=True):
            sample, obs, value = (*next(samples), None) if state is None else (None, state[1], state[0])
            replies.append(ActReply(request.worker, request.group, sample, obs, value, *final))
        return replies

    def _samples(self, requests: Sequence[ActRequest]) -> list[tuple[PolicySample, Obs | None]]:
        """Return the sample of each request, and its observations for the learner if they are precomputed here."""
        if not requests:
            return []
        noise = self._to_device([request.noise for request in requests if request.noise is not None])
        obs, computed = self._prepare([request.obs for request in requests])
        sample = self.policy.act(obs, noise)
        numbers, tensors = self._returned(
            [sample.log_prob_N, sample.value_N], [sample.action_NHA, sample.chain, *computed.values()]
        )
        version = torch.full((len(noise),), self.version, dtype=torch.int64)
        sizes = [_rows(request.obs) for request in requests]
        rows = zip(*(column.split(sizes) for column in [*numbers, version, *tensors]), strict=True)
        return [
            (PolicySample(action, log_prob, value, chain, drawn_by), dict(zip(computed, kept, strict=True)) or None)
            for log_prob, value, drawn_by, action, chain, *kept in rows
        ]

    def _values(self, parts: Sequence[Obs]) -> list[tuple[Tensor, Obs | None]]:
        """Return the values of each part, and its observations for the learner if they are precomputed here."""
        if not parts:
            return []
        obs, computed = self._prepare(parts)
        numbers, tensors = self._returned([self.policy.value(obs)], [*computed.values()])
        columns = [*numbers, *tensors]
        sizes = [_rows(part) for part in parts]
        rows = zip(*(column.split(sizes) for column in columns), strict=True)
        return [(value, dict(zip(computed, kept, strict=True)) or None) for value, *kept in rows]

    def _prepare(self, parts: Sequence[Obs]) -> tuple[Obs, Obs]:
        """Merge observations into one batch. Return it for the policy, and for the learner if precomputed here."""
        obs = self._merge(parts)
        if self.policy.precompute_in_actor:
            obs = self.policy.precompute(obs)
            return obs, obs
        return obs, {}

    def _merge(self, parts: Sequence[Obs]) -> Obs:
        return {key: self._to_device([obs[key] for obs in parts]) for key in parts[0]}

    def _to_device(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return rows.to(self.device) if self._stream is None else rows.pin_memory().to(self.device, non_blocking=True)

    def _returned(self, numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return numbers of decisions on the CPU, and other tensors as well unless they stay on the device."""
        if self._stream is None:
            return [number.cpu() for number in numbers], list(tensors)
        sources = [*numbers, *tensors]
        host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in sources]
        for destination, source in zip(host, sources, strict=True):
            destination.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return host[: len(numbers)], host[len(numbers) :]


def _rows(obs: Obs) -> int:
    return next(iter(obs.values())).shape[0]
