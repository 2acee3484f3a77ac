"""Actor server: draws the actions of many env groups with one copy of the policy.

    requests ──► concatenate ──► newest weights ──► policy.act, policy.value ──► split, stamp version ──► replies

Requests are merged into one batch, because the cost of a forward pass hardly depends on the batch size. With
max_staleness=0 each request is a batch of its own: a matrix product may round differently for another batch size.

On a GPU the server has a stream of its own; inputs go through pinned memory, and results come back with one
synchronisation. If the simulator is on the same device (``resident``), all parts use the default stream instead.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.graphs import Recorded
from embodied.core.policy import Policy
from embodied.core.types import Obs, PolicySample
from embodied.runtime.channel import WeightStore
from embodied.runtime.watch import Track


@dataclass(frozen=True, slots=True)
class ActRequest:
    """Request of one env group for its next decision, or at the end of a fragment for values alone."""

    worker: int
    group: int
    """Indices of the env worker, and of the env group in its worker."""
    obs: Obs
    noise: Tensor | None
    """Noise of ``Policy.act``, [N, ...]; None requests values alone."""
    final_obs: Obs | None = None
    """Last observations [M, ...] of the episodes that ended at the previous decision, if any did."""


@dataclass(frozen=True, slots=True)
class ActReply:
    """Reply to a request: its actions, chain and observations on the device of the request's, all else on the CPU."""

    worker: int
    group: int
    sample: PolicySample | None = None
    """The decision; None if values alone were requested."""
    obs: Obs | None = None
    """Observations for the learner in place of the request's, if the policy precomputes in the actor."""
    value_N: Tensor | None = None
    """Values of the request's ``obs``; None with a sample, whose ``value_N`` has them."""
    final_value_M: Tensor | None = None
    """Values of the request's ``final_obs``, if it has any."""
    final_obs: Obs | None = None
    """Last observations for the learner in place of the request's, if the policy precomputes in the actor."""


class ActorServer:
    """Draws actions and values for the requests of env groups.

    policy: a copy that no other part uses; it is moved to ``device``. merge: put all requests into one batch.
    index: of the server. resident: observations come from ``device``, and actions, chains and observations stay on it.
    ``track`` also counts how many requests were served together (``requests/<n>``).
    """

    def __init__(
        self,
        policy: Policy,
        store: WeightStore,
        device: torch.device,
        merge: bool,
        index: int = 0,
        resident: bool = False,
    ) -> None:
        self.policy = policy.to(device).eval()
        self.store, self.device, self.merge = store, device, merge
        self.version = -1  # of the loaded weights; -1 loads all tensors at the next ``act``
        self.track = Track(f"actor server {index}", "wait_requests")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not resident else None
        self._act = Recorded(self._draw, device, policy)

    @torch.no_grad()
    def act(self, requests: Sequence[ActRequest]) -> list[ActReply]:
        """Return one reply per request, in order. RuntimeError before the first publication."""
        self.track.add(f"requests/{len(requests)}")
        stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with self.track.during("infer"), stream:
            if self.store.version > self.version:
                with self.track.during("fetch"):
                    self._load_newest()
            batches = [requests] if self.merge else [[request] for request in requests]
            return [reply for batch in batches for reply in self._serve(batch)]

    def _load_newest(self) -> None:
        """Load the tensors of the newest weights that have changed since the loaded version."""
        weights = self.store.latest()
        changed = {name: weights.tensors[name] for name, since in weights.changed.items() if since > self.version}
        self.policy.load_state_dict(changed, strict=self.version < 0)
        if self._stream is not None:
            for tensor in changed.values():
                if tensor.is_cuda:  # on Ray they come through shared memory
                    tensor.record_stream(self._stream)  # the store may drop it before the copy is done
        self.version = weights.version

    def _serve(self, requests: Sequence[ActRequest]) -> list[ActReply]:
        """Answer all requests with one call of ``Policy.act`` and one of ``Policy.value``."""
        valued = [(None if request.noise is not None else request.obs, request.final_obs) for request in requests]
        samples = iter(self._samples([request for request in requests if request.noise is not None]))
        values = iter(self._values([obs for pair in valued for obs in pair if obs is not None]))
        replies = []
        for request in requests:
            sample = value_N = final_value_M = final_obs = None
            if request.noise is None:
                value_N, obs = next(values)
            else:
                sample, obs = next(samples)
            if request.final_obs is not None:
                final_value_M, final_obs = next(values)
            replies.append(ActReply(request.worker, request.group, sample, obs, value_N, final_value_M, final_obs))
        return replies

    def _samples(self, requests: Sequence[ActRequest]) -> list[tuple[PolicySample, Obs | None]]:
        """Return the sample of each request, and its observations for the learner if they are precomputed here."""
        if not requests:
            return []
        parts = [request.obs for request in requests]
        noise = self._to_device([request.noise for request in requests if request.noise is not None])
        obs = self._batch(parts)
        action_NHA, log_prob_N, value_N, chain = self._act(obs, noise)
        version_N = torch.full((len(noise),), self.version, dtype=torch.int64)
        rows = self._split(parts, [log_prob_N, value_N, version_N], [action_NHA, chain], obs)
        return [
            (PolicySample(action, log_prob, value, chain, version), seen)
            for (log_prob, value, version, action, chain), seen in rows
        ]

    def _draw(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sample = self.policy.act(obs, noise)
        return sample.action_NHA, sample.log_prob_N, sample.value_N, sample.chain

    def _values(self, parts: Sequence[Obs]) -> list[tuple[Tensor, Obs | None]]:
        if not parts:
            return []
        obs = self._batch(parts)
        return [(value, seen) for (value,), seen in self._split(parts, [self.policy.value(obs)], [], obs)]

    def _batch(self, parts: Sequence[Obs]) -> Obs:
        """Merge observations into one batch on the device, precomputed if the policy does so in the actor."""
        obs = {key: self._to_device([part[key] for part in parts]) for key in parts[0]}
        return self.policy.precompute(obs) if self.policy.precompute_in_actor else obs

    def _to_device(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return rows.to(self.device) if self._stream is None else rows.pin_memory().to(self.device, non_blocking=True)

    def _split(
        self, parts: Sequence[Obs], numbers: Sequence[Tensor], tensors: Sequence[Tensor], obs: Obs
    ) -> list[tuple[Sequence[Tensor], Obs | None]]:
        """Return the rows of each part of a batch, and its observations for the learner if they are precomputed here.

        Numbers of decisions come to the CPU. Other tensors and observations do so as well, unless resident.
        """
        kept = obs if self.policy.precompute_in_actor else {}
        columns = [*numbers, *tensors, *kept.values()]
        if self._stream is None:
            columns[: len(numbers)] = [number.cpu() for number in numbers]
        else:
            sources = columns
            columns = [torch.empty_like(source, device="cpu", pin_memory=True) for source in sources]
            for column, source in zip(columns, sources, strict=True):
                column.copy_(source, non_blocking=True)
            self._stream.synchronize()
        sizes = [len(next(iter(part.values()))) for part in parts]
        rows = zip(*(column.split(sizes) for column in columns), strict=True)
        num = len(columns) - len(kept)
        return [(row[:num], dict(zip(kept, row[num:], strict=True)) or None) for row in rows]
