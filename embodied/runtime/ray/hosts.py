"""What runs in the processes of Ray: the ordinary parts, each behind a host that answers calls.

    controller ── sample(ticket) ──► WorkerHost(EnvWorker) ── act(request) ──► ServerHost(ActorServer) pulls weights
        └──────── learn(references of fragments) ──► LearnerHost(Learner) ──► puts weights       (learner_host.py)

A host is an asyncio actor: its event loop receives calls at any time, and one thread of its own, the only one that
touches the part, computes. Everything is built in ``build``, so that what is raised there arrives as it is.
"""

import asyncio
import copy
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from embodied.core.device import resolve_device
from embodied.core.episodes import EpisodeStats
from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.collecting.actor_server import ActorServer, ActReply, ActRequest
from embodied.runtime.ledger import Ticket
from embodied.runtime.ray.supervision import Unresponsive
from embodied.runtime.ray.wire import Publication, PulledWeights, nbytes, share_tensors
from embodied.runtime.recipe import Recipe
from embodied.runtime.watch import Span, Totals, Track

P = ParamSpec("P")
T = TypeVar("T")


class ServerLost(Exception):
    """An env worker got no answer from its actor server, for ``cause``; the fragment can go on with another one."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Built:
    """Facts about a part that is ready, for the controller."""

    node: str
    pid: int
    """Ray's id of its node, and the id of its process there."""
    resumes_exactly: bool
    """Whether all its envs can be restored from a checkpoint; of env workers."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sign of life of a part."""

    doing: str
    """Its present operation, or what it waits for."""
    done: int
    busy_s: float
    """Time in the present operation; 0 while it waits."""
    spans: Sequence[Span]
    """Of its tracks since the last one, while a trace is recorded."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A fragment by reference, as it waits in the channel. Its tensors stay in the object store."""

    worker: int
    group: int
    sequence: int
    episodes: EpisodeStats
    totals: Totals
    server_totals: Totals
    """Totals of this incarnation of the worker, and of its actor server."""
    fragment: Any = None
    """Reference to the fragment, once the controller has added it."""


class Host(ABC):
    """Event loop and computing thread of a part. recipe: of the run."""

    resumes_exactly = True

    def __init__(self, recipe: Recipe) -> None:
        share_tensors()
        self.recipe = recipe
        self._tracks: list[Track] = []  # of the part, once it is built
        self._thread = ThreadPoolExecutor(1)
        self._doing, self._done, self._since = "is built", 0, time.monotonic()

    async def build(self, peers: Sequence[Any] = ()) -> Built:
        """Build the part. peers: handles of its other processes; only a learner has them."""
        self._tracks = await self._run("builds", self._build)
        self._take_spans(self.recipe.config.trace)  # until a pulse ends it
        return Built(ray.get_runtime_context().get_node_id(), os.getpid(), self.resumes_exactly)

    @abstractmethod
    def _build(self) -> list[Track]:
        """Build the part in the computing thread; return its tracks."""

    async def pulse(self, tracing: bool) -> Pulse:
        """Return a sign of life. tracing: whether spans are recorded from now on."""
        busy_s = time.monotonic() - self._since if self._since else 0.0
        return Pulse(self._doing, self._done, busy_s, self._take_spans(tracing))

    def _take_spans(self, recording: bool) -> list[Span]:
        return [span for track in self._tracks for span in track.take_spans(recording)]

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
        self._doing, self._since = doing, time.monotonic()


class WorkerHost(Host):
    """An env worker. index: of the worker; incarnation: of its seeds. execute, noise_shape: those of the policy."""

    def __init__(
        self, recipe: Recipe, index: int, incarnation: int, execute: int, noise_shape: tuple[int, ...], num_threads: int
    ) -> None:
        super().__init__(recipe)
        self.index, self.given, self.num_threads = index, (execute, noise_shape, incarnation), num_threads

    def _build(self) -> list[Track]:
        threads.use(1)
        envs = self.recipe.open_envs(self.index, self.num_threads)
        self.worker = self.recipe.env_worker(self.index, envs, *self.given)
        self.resumes_exactly = self.worker.resumes_exactly
        return self.worker.tracks

    async def sample(
        self, ticket: Ticket, server: Any, publication: Publication, timeout_s: float
    ) -> tuple[Delivery, Fragment]:
        """Sample the fragment of a ticket with at least these weights, or go on with it after a ServerLost.

        A request that got no answer is sent again as it was. An inference is a function of request and weights, so it
        does no harm if it was answered before. ServerLost if there is no answer after ``timeout_s``.
        """
        group, worker, track = ticket.group, self.worker, self.worker.track
        rollout = worker.rollouts[group]
        if rollout.request is None:
            await self._run(f"starts group {group}", worker.start, ticket)
        assert rollout.ticket == ticket, "a group has one fragment at a time"
        result: ActRequest | Fragment | None = rollout.request
        while not isinstance(result, Fragment):
            try:
                track.add("requests_bytes", nbytes(result))
                reply, server_totals = await asyncio.wait_for(server.act.remote(result, publication), timeout_s)
            except RayTaskError as error:
                error.cause.add_note(str(error))  # the traceback of the server's process
                raise ServerLost(error.cause) from None
            except RayError as error:
                raise ServerLost(Unresponsive(str(error))) from None
            except TimeoutError:
                raise ServerLost(Unresponsive(f"no answer in {timeout_s:g} s")) from None
            track.add("replies_bytes", nbytes(reply))
            result = await self._run(f"steps group {group}", worker.advance, reply)
        track.add("fragments_bytes", nbytes(result))
        episodes, totals = result.episodes, track.totals()
        return Delivery(ticket.worker, group, ticket.sequence, episodes, totals, server_totals), result

    async def state_dict(self, group: int) -> dict[str, Any]:
        return await self._run(f"saves group {group}", self.worker.rollouts[group].state_dict)

    async def load_state_dict(self, group: int, state: Mapping[str, Any]) -> None:
        load = self.worker.rollouts[group].load_state_dict
        await self._run(f"loads group {group}", load, copy.deepcopy(state))

    async def close(self) -> None:
        await self._run("closes its envs", self.worker.close)


class ServerHost(Host):
    """An actor server. policy: the initial one. index: of the server."""

    def __init__(self, recipe: Recipe, policy: Policy, index: int, num_threads: int) -> None:
        super().__init__(recipe)
        self.policy, self.index, self.num_threads = policy, index, num_threads
        self.store = PulledWeights()
        self._waiting: list[tuple[ActRequest, asyncio.Future[tuple[ActReply, Totals]]]] = []
        self._serving: asyncio.Task[None] | None = None

    def _build(self) -> list[Track]:
        threads.use(self.num_threads)
        policy, merge = copy.deepcopy(self.policy), self.recipe.config.max_staleness > 0
        device = resolve_device(self.recipe.device.type)
        self.actor = ActorServer(policy, self.store, device, merge, self.index)
        return [self.actor.track]

    async def act(self, request: ActRequest, publication: Publication) -> tuple[ActReply, Totals]:
        """Return the reply by these weights or newer ones, and all totals; requests meanwhile are served together."""
        self.store.offer(publication)
        future: asyncio.Future[tuple[ActReply, Totals]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            requests, futures = zip(*batch, strict=True)
            try:
                learner = self.store.learner
                with self.actor.track.during("fetch"):
                    self.actor.track.add("weights_bytes", await self.store.pull())
                if self.store.learner != learner:
                    self.actor.version = -1  # of another learner, with other versions
                replies = await self._run(f"acts for {len(requests)} groups", self.actor.act, requests)
            except Exception as error:  # of any kind: every caller gets it
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            totals = self.actor.track.totals()
            for future, reply in zip(futures, replies, strict=True):
                if not future.done():  # a caller that gave up cancels it
                    future.set_result((reply, totals))
