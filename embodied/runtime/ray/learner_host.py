"""What runs in a learner's process of Ray: the learner, or one of several that make each update together.

controller ── learn(fragments, by reference) ──► process 0: updates on every n-th, puts weights
                                                     ├── update(its share) ──► process r       (algos/sharing.py)
                                                     └── sums over all processes ── process r  (Collective)

To the controller several processes are one part: if one fails, all are killed and replaced (docs/scaling.md).
"""

import asyncio
import copy
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed
from torch import Tensor

from embodied.core.algorithm import SINGLE_PROCESS, Metrics, ProcessGroup
from embodied.core.device import resolve_device
from embodied.core.policy import Policy
from embodied.runtime import threads
from embodied.runtime.channel import WeightStore
from embodied.runtime.learner import Learner
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.ray.hosts import Built, Host, Pulse
from embodied.runtime.ray.wire import PeerLost, Publication, Publisher, fetch
from embodied.runtime.recipe import Recipe
from embodied.runtime.threads import ThreadBudget
from embodied.runtime.watch import Totals, Track, joined

dist: Any = torch.distributed  # the stubs of torch 2.13 lack options of its groups


Rendezvous = tuple[str, int]
"""Address and port of the store of process 0, where the processes of a group find each other."""


def open_store(address: str, timeout_s: float) -> tuple[Any, Rendezvous]:
    """Open the store of a group on a free port of ``address``, in its process 0, which must keep it."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, (address, port)


class Collective(ProcessGroup):
    """Several processes, which sum with torch.distributed.

    address: of this process's node. device: of the policy; CUDA sums by NCCL. PeerLost if a process does not join
    within ``timeout_s``, and from ``sum`` if one is gone or does not take part for so long.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, *, address: str, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(*rendezvous, is_master=False, timeout=limit)
            if device.type == "cuda":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
            else:
                gloo = dist.ProcessGroupGloo._Options()
                gloo._timeout = limit
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
        except RuntimeError as error:  # of any kind: torch.distributed has no narrower class for a silent peer
            raise PeerLost(f"learner process {rank} of {size} cannot join the others: {error}") from error

    def sum(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().to(self.device, copy=True).contiguous()
        if values.numel():
            try:
                self._group.allreduce([values]).wait()
            except RuntimeError as error:
                raise PeerLost(f"learner process {self.rank} of {self.size} misses another one: {error}") from error
        return values.to(tensor.device)


@dataclass(frozen=True, slots=True)
class Learned:
    """Result of an update, or of a publication without one."""

    metrics: Metrics
    """Of the algorithm, and ``async/lost``, the fragments that were lost with their node."""
    publication: Publication
    iteration: int
    env_steps: int
    """Batches and control steps consumed."""
    totals: Totals
    """Totals of its track so far, joined with those of the other processes."""


class LearnerHost(Host):
    """A learner. policy: the initial one. rng_state: of torch's generator after it was built. rank: of the process."""

    def __init__(
        self, recipe: Recipe, incarnation: int, policy: Policy, rng_state: Tensor, budget: ThreadBudget, rank: int = 0
    ) -> None:
        super().__init__(recipe)
        self.policy, self.rng_state, self.budget, self.rank = policy, rng_state, budget, rank
        self.config = RayConfig.of(recipe.config)
        self.publisher, self.store = Publisher(incarnation), WeightStore()
        self.peers: Sequence[Any] = ()
        self._others_idle = False

    async def build(self, peers: Sequence[Any] = (), rendezvous: Rendezvous | None = None) -> Built:
        """Build the learner, with ``peers`` in process 0. UserError if several processes cannot share an update."""
        self.peers, self._rendezvous, self._address = peers, rendezvous, ray.util.get_node_ip_address()
        if peers:
            self._sums, self._rendezvous = open_store(self._address, self.config.start_timeout_s)
        others = [peer.build.remote((), self._rendezvous) for peer in peers]
        built: list[Built] = await asyncio.gather(super().build(), *others)
        return built[0]

    def _build(self) -> list[Track]:
        threads.use(self.budget.learner)
        recipe = self.recipe
        device = resolve_device(recipe.device.type)
        policy = copy.deepcopy(self.policy).to(device)
        torch.set_rng_state(self.rng_state.clone())
        algorithm = recipe.make_algorithm(policy)
        learners = SINGLE_PROCESS
        if self._rendezvous is not None:
            learners = Collective(
                self._rendezvous, self.rank, self.config.num_learners,
                address=self._address, device=device, timeout_s=self.config.update_timeout_s,
            )  # fmt: skip
        self.learner = Learner(algorithm, self.store, recipe.config.mask_above, learners)
        self.learner.track.enter("wait_controller")
        return [self.learner.track]

    async def pulse(self, tracing: bool) -> Pulse:
        """Return one sign of life of all processes: what process 0 does, and the longest present operation."""
        others = [peer.pulse.remote(tracing) for peer in self.peers]
        pulses: list[Pulse] = await asyncio.gather(super().pulse(tracing), *others)
        done, busy_s = sum(pulse.done for pulse in pulses), max(pulse.busy_s for pulse in pulses)
        return replace(pulses[0], done=done, busy_s=busy_s)

    async def publish(self) -> Learned:
        await self._run("publishes", self.learner.publish)
        return await self._put({}, self.learner.track.totals())

    async def learn(self, fragments: Sequence[Any]) -> Learned:
        """Update on a batch, given by reference, of which each process gets every n-th fragment, and publish."""
        num = 1 + len(self.peers)
        others = [peer.update.remote(fragments[rank::num]) for rank, peer in enumerate(self.peers, 1)]
        updates = await asyncio.gather(self.update(fragments[::num]), *others)
        lost = sum(metrics["async/lost"] for metrics, _ in updates)
        return await self._put(updates[0][0] | {"async/lost": lost}, joined([totals for _, totals in updates]))

    async def update(self, fragments: Sequence[Any]) -> tuple[Metrics, Totals]:
        """Make an update on this process's share of a batch, without what was lost; return its metrics and totals."""
        doing = f"batch {self.learner.iteration}"
        self._begin(f"fetches {doing}")
        with self.learner.track.during("fetch"):
            fetched = await fetch(fragments)

        def update() -> Metrics:
            with threads.using_idle_cores(self.budget.learner, self.budget.learner_alone, lambda: self._others_idle):
                return self.learner.learn(fetched)

        metrics = await self._run(f"learns from {doing}", update)
        return {**metrics, "async/lost": float(len(fragments) - len(fetched))}, self.learner.track.totals()

    async def _put(self, metrics: Metrics, totals: Totals) -> Learned:
        publication = await self._run("puts weights", self.publisher.put, self.store.latest())
        return Learned(metrics, publication, self.learner.iteration, self.learner.env_steps, totals)

    async def set_others_idle(self, others_idle: bool) -> None:
        """Say whether all other parts are idle, so that the learner can use their cores."""
        self._others_idle = others_idle
        for peer in self.peers:
            peer.set_others_idle.remote(others_idle)

    async def deployed_weights(self) -> dict[str, Tensor]:
        return await self._run("copies weights", self.learner.deployed_weights)

    async def state_dict(self) -> dict[str, Any]:
        return await self._run("saves its state", self.learner.state_dict)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, in all processes."""
        shared = ray.put(state) if self.peers else None
        others = [peer.load_state_dict.remote(shared) for peer in self.peers]
        await asyncio.gather(self._run("loads a state", self.learner.load_state_dict, copy.deepcopy(state)), *others)
