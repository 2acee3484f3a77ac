"""What runs in the processes of Ray: the ordinary parts, each behind a host that answers calls.

    controller ── sample(ticket) ──► WorkerHost(EnvWorker) ── act(request) ──► ServerHost(ActorServer) pulls weights
        └──────── learn(references of fragments) ──► LearnerHost(Learner) ──► puts weights       (learner_host.py)

A host is an asyncio actor: its event loop receives calls and signs of life at any time, and one thread of its own, the
only one that touches the part, computes. Everything is built in ``build``, so that what is raised there arrives as
it is.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.collecting.actor_server import ActorServer
from embodied.runtime.collecting.env_worker import EnvWorker
from embodied.runtime.collecting.messages import ActReply, ActRequest
from embodied.runtime.ledger import Ticket
from embodied.runtime.ray.messages import Built, Pulse, ServerLost, Summary
from embodied.runtime.ray.supervision import Unresponsive
from embodied.runtime.ray.weights import Publication, PulledWeights
from embodied.runtime.ray.wire import nbytes, share_tensors
from embodied.runtime.recipe import Recipe
from embodied.runtime.watch.trace import take
from embodied.runtime.watch.track import Track

P = ParamSpec("P")
T = TypeVar("T")


class Host:
    """Event loop and computing thread of a part. recipe: of the run."""

    def __init__(self, recipe: Recipe) -> None:
        share_tensors()
        self.recipe = recipe
        self._tracks: list[Track] = []  # of the part, once it is built
        self._thread = ThreadPoolExecutor(1)
        self._doing, self._done, self._since = "is built", 0, time.monotonic()

    async def pulse(self, tracing: bool) -> Pulse:
        """Return a sign of life. tracing: whether spans are recorded from now on."""
        busy_s = time.monotonic() - self._since if self._since else 0.0
        return Pulse(self._doing, self._done, busy_s, take(self._tracks, tracing))

    def _record(self, tracks: list[Track]) -> None:
        """Record the spans of these tracks, if a trace is wanted, until a pulse ends it."""
        self._tracks = tracks
        take(tracks, self.recipe.config.trace)

    async def _run(self, doing: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the computing thread, after those that were given to it before."""

        def run() -> T:
            self._begin(doing)
            try:
                return function(*args, **kwargs)
            finally:
                self._doing, self._since, self._done = "waits", 0.0, self._done + 1

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _begin(self, doing: str) -> None:
        """Note the operation that begins now."""
        self._doing, self._since = doing, time.monotonic()


class WorkerHost(Host):
    """An env worker. index: of the worker; incarnation: of its seeds. execute, noise_shape: those of the policy."""

    def __init__(
        self, recipe: Recipe, index: int, incarnation: int, execute: int, noise_shape: tuple[int, ...], num_threads: int
    ) -> None:
        super().__init__(recipe)
        self.key, self.shape, self.num_threads = (index, incarnation), (execute, noise_shape), num_threads
        self._requests: dict[int, ActRequest] = {}  # by group, whose replies have not been used

    async def build(self) -> Built:
        """Build the envs."""
        self.worker = await self._run("builds its envs", self._build)
        self._record(self.worker.tracks)
        return Built(node_id(), os.getpid(), self.worker.resumes_exactly)

    async def sample(
        self, ticket: Ticket, server: Any, publication: Publication, timeout_s: float
    ) -> tuple[Summary, Fragment]:
        """Sample the fragment of a ticket with at least these weights, or go on with it after a ServerLost.

        A request that got no answer is sent again as it was. An inference is a function of request and weights, so it
        does no harm if it was answered before. ServerLost if there is no answer after ``timeout_s``.
        """
        group = ticket.group
        if group not in self._requests:
            self._requests[group] = await self._run(f"starts group {group}", self.worker.start, ticket)
        assert self.worker.open[group].ticket == ticket, "a group has one fragment at a time"
        while True:
            try:
                self.worker.track.add("requests_bytes", nbytes(self._requests[group]))
                answer = server.act.remote(self._requests[group], publication)
                reply, server_totals = await asyncio.wait_for(answer, timeout_s)
            except RayTaskError as error:
                error.cause.add_note(str(error))  # the traceback of the server's process
                raise ServerLost(error.cause) from None
            except RayError as error:
                raise ServerLost(Unresponsive(str(error))) from None
            except TimeoutError:
                raise ServerLost(Unresponsive(f"no answer in {timeout_s:g} s")) from None
            self.worker.track.add("replies_bytes", nbytes(reply))
            result = await self._run(f"steps group {group}", self.worker.advance, reply)
            if isinstance(result, Fragment):
                del self._requests[group]
                self.worker.track.add("fragments_bytes", nbytes(result))
                summary = Summary(
                    worker=ticket.worker,
                    group=group,
                    incarnation=ticket.incarnation,
                    sequence=ticket.sequence,
                    num_env_steps=result.num_env_steps,
                    episodes=result.episodes,
                    totals=self.worker.totals(),
                    server_totals=server_totals,
                )
                return summary, result
            self._requests[group] = result

    async def state_dict(self, group: int) -> dict[str, Any]:
        """Return the state of one group, between two of its fragments."""
        return await self._run(f"saves group {group}", self.worker.state_dict, group)

    async def load_state_dict(self, group: int, state: Mapping[str, Any]) -> None:
        """Continue one group from its state."""
        await self._run(f"loads group {group}", self.worker.load_state_dict, group, copy.deepcopy(state))

    async def close(self) -> None:
        """Close the envs."""
        await self._run("closes its envs", self.worker.close)

    def _build(self) -> EnvWorker:
        threads.use(1)
        (index, incarnation), (execute, noise_shape) = self.key, self.shape
        envs = self.recipe.open_envs(index, self.num_threads)
        return self.recipe.env_worker(index, envs, execute, noise_shape, incarnation)


class ServerHost(Host):
    """An actor server. policy: the initial one. index: of the server."""

    def __init__(self, recipe: Recipe, policy: Policy, index: int, num_threads: int) -> None:
        super().__init__(recipe)
        self.policy, self.index, self.num_threads = policy, index, num_threads
        self.store = PulledWeights()
        self._waiting: list[tuple[ActRequest, asyncio.Future[tuple[ActReply, dict[str, float]]]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def build(self) -> Built:
        """Build the actor server."""
        self.actor = await self._run("builds the policy", self._build)
        self._record([self.actor.track])
        return Built(node_id(), os.getpid())

    async def act(self, request: ActRequest, publication: Publication) -> tuple[ActReply, dict[str, float]]:
        """Return the reply, by these weights or newer ones, and the totals of the actor server so far.

        Requests that arrive during an inference are served together by the next one.
        """
        self.store.offer(publication)
        future: asyncio.Future[tuple[ActReply, dict[str, float]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            requests, futures = [request for request, _ in batch], [future for _, future in batch]
            try:
                learner = self.store.learner
                with self.actor.track.during("fetch"):
                    self.actor.track.add("weights_bytes", await self.store.pull())
                if self.store.learner != learner:
                    self.actor.forget()
                replies = await self._run(f"acts for {len(requests)} groups", self.actor.act, requests)
            except Exception as error:  # of any kind: every caller gets it
                for future in futures:
                    future.set_exception(error)
                continue
            totals = self.actor.totals()
            for future, reply in zip(futures, replies, strict=True):
                if not future.done():  # a caller that gave up cancels it
                    future.set_result((reply, totals))

    def _build(self) -> ActorServer:
        threads.use(self.num_threads)
        recipe = self.recipe
        merge = recipe.config.max_staleness > 0
        return ActorServer(copy.deepcopy(self.policy), self.store, recipe.device, merge, self.index)


def node_id() -> str:
    """Return Ray's id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())
