"""Policy servers in threads of this process, and requests to them."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from embodied.deployment.bundle.description import PARITY_FILE
from embodied.deployment.bundle.format import load_arrays
from embodied.deployment.bundle.runner import Planner, PolicyRunner
from embodied.deployment.options import ServeOptions
from embodied.deployment.serving.protocol import decode, encode
from embodied.deployment.serving.server import PolicyServer
from tests.deployment.exports import flow_bundle

LARGE = 2**23


@contextmanager
def serving(planner: Planner, **options: Any) -> Iterator[tuple[PolicyServer, int]]:
    """A server on a free port of this machine, and the port. options: of the server."""
    port: Future[int] = Future()
    stop: list[Any] = []
    server = PolicyServer(planner, ServeOptions(**{"bundle": "", "port": 0} | options))

    async def serve() -> None:
        event = asyncio.Event()
        stop.extend((asyncio.get_running_loop(), event))
        async with server.listening() as found:
            port.set_result(found)
            await event.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield server, port.result(30)
    finally:
        stop[0].call_soon_threadsafe(stop[1].set)
        thread.join(30)
        assert not thread.is_alive()


class Client:
    """A plain websocket client that speaks the protocol."""

    def __init__(self, port: int, **options: Any) -> None:
        self.socket: ClientConnection = connect(
            f"ws://127.0.0.1:{port}", compression=None, proxy=None, legacy=True, **options
        )
        self.metadata = decode(self.socket.recv(), LARGE)

    def ask(self, request: Any) -> Any:
        """The reply to a request: a dict, or the text of an error."""
        self.socket.send(encode(request))
        reply = self.socket.recv()
        return reply if isinstance(reply, str) else decode(reply, LARGE)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def http_get(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Status and body of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def rows() -> dict[str, np.ndarray]:
    """Recorded inputs of the flow policy's bundle."""
    arrays = load_arrays(flow_bundle() / PARITY_FILE)
    return {name: arrays[name] for name in ("state", "noise")}


class Gate:
    """A runner whose calls wait until the gate is open; it keeps the number of rows of each."""

    def __init__(self) -> None:
        self.runner = PolicyRunner(flow_bundle())
        self.bundle = self.runner.bundle
        self.open, self.entered = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        self.waiting: Callable[[], int] = lambda: 0

    def plan(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        self.entered.set()
        assert self.open.wait(60)
        self.sizes.append(len(inputs["state"]))
        return self.runner.plan(inputs)
