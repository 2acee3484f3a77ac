"""A policy server with openpi's protocol over websockets, for many clients.

    client                              server
    GET / (Authorization: Api-Key ..) ► 101, or 401, 403, 404, 503
                                      ◄ description of the bundle            one binary frame
    request                           ► ─► batch with those of others
                                      ◄ {"actions", "server_timing"}         one binary frame, or
                                      ◄ message of an error                  one text frame; the next request may follow

``GET /healthz`` answers 200. A connection has at most one request under way. Every wait has a limit, and no client
blocks another one. One thread plans for all: whatever waits, at most ``max_batch`` requests, becomes one batch.
"""

import asyncio
import queue
import sys
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from embodied.core.errors import UserError
from embodied.core.spec import described
from embodied.deployment.bundle.runner import Planner
from embodied.deployment.options import ServeOptions
from embodied.deployment.serving import protocol

GOING_AWAY = 1001  # code of websockets for a connection that the server ends
HANDSHAKE_S = 5.0  # longest handshake
SEND_S = 10.0  # longest wait for a client that does not read
CLOSE_S = 2.0  # longest wait for the other side when a connection is closed
MAX_HANDSHAKES = 64  # connections besides the clients, most of them without a key yet
MAX_FRAMES = 4  # frames that wait in a connection

Inputs = dict[str, NDArray[Any]]
Reply = tuple[NDArray[np.float32], dict[str, float]]
"""Chunk [H, A] of a row, physical units; time of the planner for its batch, ms, and rows of that."""
Job = tuple[Inputs, Future[Reply]]


class Batcher:
    """Plans rows of several requests in one call of the planner, at most ``max_batch``, in a thread of its own."""

    def __init__(self, planner: Planner, max_batch: int) -> None:
        self.planner, self.max_batch = planner, max_batch
        self.batches = self.largest_batch = 0
        self.queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1)

    async def plan(self, inputs: Inputs) -> Reply:
        """Return the chunk of one row; the inputs must have been checked. Errors of the planner are raised here."""
        future: Future[Reply] = Future()
        self.queue.put((inputs, future))
        self._thread.submit(self._plan_waiting)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Plan what waits, then end the thread."""
        self._thread.shutdown()

    def _plan_waiting(self) -> None:
        """Plan what waits, if a batch before has not taken it."""
        jobs = [self.queue.get() for _ in range(min(self.queue.qsize(), self.max_batch))]
        jobs = [job for job in jobs if job[1].set_running_or_notify_cancel()]  # not of clients that have gone
        if jobs:
            self._plan(jobs)

    def _plan(self, jobs: Sequence[Job]) -> None:
        """Plan a batch. If the planner refuses it, plan its rows alone, so that only the rows at fault fail."""
        self.batches, self.largest_batch = self.batches + 1, max(self.largest_batch, len(jobs))
        rows = [inputs for inputs, _ in jobs]
        began_s = time.perf_counter()
        try:
            chunk = self.planner.plan({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
        except Exception as error:  # whatever ONNX Runtime raises must not end the thread
            if len(jobs) > 1:
                for job in jobs:
                    self._plan([job])
                return
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            jobs[0][1].set_exception(error)
            return
        infer_ms = 1e3 * (time.perf_counter() - began_s)
        for (_, future), row_HA in zip(jobs, chunk, strict=True):
            future.set_result((row_HA, {"infer_ms": infer_ms, "batch": len(jobs)}))


class PolicyServer:
    """Serves chunks of one planner. ``listening()`` is its life; it runs in the event loop that enters it."""

    def __init__(self, planner: Planner, options: ServeOptions) -> None:
        self.planner, self.options = planner, options
        self.requests = self.errors = self.clients = self.refused = 0
        self.batcher = Batcher(planner, options.max_batch)
        self._metadata = protocol.encode(described(planner.bundle))
        self._max_bytes = protocol.max_request_bytes(planner.bundle)
        chunk_bytes = 4 * planner.bundle.horizon * planner.bundle.action_dim
        self._max_unsent = len(self._metadata) + chunk_bytes + protocol.ALLOWANCE_BYTES

    def result(self) -> dict[str, int]:
        """Return counts: requests that got a chunk or an error, clients, refused handshakes, batches."""
        return {
            "requests": self.requests, "errors": self.errors, "clients": self.clients, "refused": self.refused,
            "batches": self.batcher.batches, "largest_batch": self.batcher.largest_batch,
        }  # fmt: skip

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Listen, and yield the port; at the end finish what is under way. UserError if the address cannot be had."""
        options = self.options
        try:
            server = await serve(
                self._converse, options.host, options.port, process_request=self._admit,
                create_connection=_limited(options.max_clients + MAX_HANDSHAKES, self._max_unsent), compression=None,
                open_timeout=HANDSHAKE_S, close_timeout=CLOSE_S, max_size=self._max_bytes, max_queue=MAX_FRAMES,
            )  # fmt: skip
        except OSError as error:
            self.batcher.close()
            reason = error.strerror or str(error)
            raise UserError(f"cannot listen on host={options.host} port={options.port}: {reason}") from None
        try:
            yield next(iter(server.server.sockets)).getsockname()[1]
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.to_thread(self.batcher.close)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a handshake: None admits it. Nothing about the policy is told before the key was right."""
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        key, max_clients = self.options.api_key, self.options.max_clients
        if request.headers.get_all("Origin"):
            status, why = HTTPStatus.FORBIDDEN, "Pages in a browser may not connect.\n"
        elif key is not None and not protocol.is_authorized(request.headers.get_all("Authorization"), key):
            status, why = HTTPStatus.UNAUTHORIZED, "The API key is missing or wrong.\n"
        elif request.path != "/":
            status, why = HTTPStatus.NOT_FOUND, "The policy is at /.\n"
        elif len(connection.server.all_connections) >= max_clients:
            status, why = HTTPStatus.SERVICE_UNAVAILABLE, f"All {max_clients} places for clients are taken.\n"
        else:
            return None
        self.refused += 1
        response = connection.respond(status, why)
        if status == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = protocol.SCHEME
        return response

    async def _converse(self, connection: ServerConnection) -> None:
        """Answer the requests of one client until it goes."""
        self.clients += 1
        number, previous_ms = self.clients, None
        print(f"client {number} connected from {connection.remote_address[0]}", file=sys.stderr)
        reader = protocol.RequestReader(self.planner.bundle, seed=number)
        try:
            await _send(connection, self._metadata)
            while True:
                async with asyncio.timeout(self.options.idle_s):
                    message = await connection.recv()
                began_s = time.perf_counter()
                await _send(connection, await self._reply(reader, message, previous_ms))
                previous_ms = 1e3 * (time.perf_counter() - began_s)
        except (ConnectionClosed, ConnectionAbortedError):
            pass
        except TimeoutError:
            await connection.close(GOING_AWAY, f"no request for {self.options.idle_s:g} s")
        print(f"client {number} has gone", file=sys.stderr)

    async def _reply(
        self, reader: protocol.RequestReader, message: str | bytes, previous_ms: float | None
    ) -> str | bytes:
        """Return the reply to a message: bytes, or the text of an error."""
        try:
            if isinstance(message, str):
                raise UserError("request: got a text frame, allowed: binary frames with msgpack")
            chunk_HA, timing = await self.batcher.plan(reader.inputs(protocol.decode(message, self._max_bytes)))
        except Exception as error:  # of the planner, whose thread has printed it
            self.errors += 1
            return str(error) if isinstance(error, UserError) else f"the server failed: {type(error).__name__}"
        self.requests += 1
        if previous_ms is not None:
            timing["prev_total_ms"] = previous_ms
        return protocol.encode({"actions": chunk_HA, "server_timing": timing})


async def _send(connection: ServerConnection, message: str | bytes) -> None:
    """Send a message. ConnectionAbortedError for a client that does not read, which is cut off."""
    try:
        async with asyncio.timeout(SEND_S):
            await connection.send(message)
    except TimeoutError:
        connection.transport.abort()
        raise ConnectionAbortedError from None


def _limited(limit: int, max_unsent: int) -> type[ServerConnection]:
    """Return a class of connections that are cut at once if the server has more than ``limit``, whatever their state.

    It is also cut if more than ``max_unsent`` bytes wait for the client to read them: pongs, which answer pings without
    waiting, and one message.
    """

    class Limited(ServerConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            if len(self.server.handler_tasks) > limit:
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.transport.get_write_buffer_size() > max_unsent:
                self.transport.abort()

    return Limited
