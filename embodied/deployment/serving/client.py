"""Plan on a policy server from a robot's computer. Needs numpy, websockets and msgpack.

with RemotePlanner("ws://server:8000", bundle=read_bundle(path)) as planner:
    chunk = planner.plan({"state": state, "noise": noise})      # [1, H, A], physical units

What limits the robot's motion never comes from the network, but from the bundle on the robot's computer.
"""

import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from embodied.core.errors import UserError, one_line
from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.format import MAX_JSON_BYTES, parse_bundle
from embodied.deployment.bundle.runner import InputSpec
from embodied.deployment.serving.protocol import ALLOWANCE_BYTES, SCHEME, VARIABLE, decode, encode, request_of

MAX_ERROR = 2000  # characters of a server's error that are repeated


def content_of(reply: str | bytes, max_bytes: int) -> Any:
    """Return the content of a reply. UserError for text, by which servers refuse a request, or a malformed reply."""
    if isinstance(reply, str):
        raise UserError(reply[:MAX_ERROR])
    return decode(reply, max_bytes)


class PolicyConnection:
    """A connection to any server of openpi's protocol, which is made again, once, if it is lost.

    url: ws://host:port, or wss:// behind a proxy that encrypts. api_key: key of the server. timeout_s: longest call.

    UserError for a wrong address or key. ConnectionError if there is no such server, or it is late.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 5.0) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise UserError(f"server={url}: allowed: ws://host:port or wss://host:port")
        if not 0 < timeout_s <= 3600:
            raise UserError(f"timeout_s: got {timeout_s}, allowed: above 0, at most 3600")
        self.url, self.timeout_s = url, timeout_s
        self._headers = None if api_key is None else {"Authorization": f"{SCHEME} {api_key}"}
        self._connection: ClientConnection | None = self._connect(time.monotonic() + timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, request: Mapping[str, Any], max_bytes: int) -> Any:
        """Return the reply to a request. UserError for what the server refuses, ConnectionError if it is malformed."""
        reply = self._exchange(encode(request), time.monotonic() + self.timeout_s)
        try:
            return content_of(reply, max_bytes)
        except UserError as error:
            kind = UserError if isinstance(reply, str) else ConnectionError
            raise kind(f"{self.url}: {one_line(error)}") from None

    def greeted(self, greeting: str | bytes) -> None:
        """Check the server's metadata. UserError or ConnectionError if it is not what is needed."""
        try:
            content_of(greeting, MAX_JSON_BYTES)
        except UserError as error:
            raise ConnectionError(f"{self.url} is no policy server: {one_line(error)}") from None

    def _exchange(self, message: bytes, deadline_s: float, again: bool = True) -> str | bytes:
        """Return the reply to a message, ``again`` after one new connection if the present one is lost."""
        if self._connection is None:
            self._connection = self._connect(deadline_s)
        try:
            self._connection.send(message)
            return self._connection.recv(timeout=max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            self.close()  # a late reply must not be taken for that of the next request
            raise ConnectionError(f"{self.url} did not reply within {self.timeout_s:g} s") from None
        except (ConnectionClosed, OSError) as error:
            self._connection = None
            if not again:
                raise ConnectionError(f"{self.url} closed the connection twice: {one_line(error)}") from None
        return self._exchange(message, deadline_s, again=False)

    def _connect(self, deadline_s: float) -> ClientConnection:
        """Connect and check the description of the server's policy."""
        try:
            connection = connect(
                self.url, additional_headers=self._headers, compression=None, proxy=None,
                open_timeout=max(1e-3, deadline_s - time.monotonic()), close_timeout=1.0, max_size=MAX_JSON_BYTES,
                max_queue=4, legacy=True,
            )  # fmt: skip
        except InvalidURI as error:
            raise UserError(f"server={self.url}: {one_line(error)}") from None
        except InvalidStatus as error:
            status, body = error.response.status_code, (error.response.body or b"")[:200].decode(errors="replace")
            if status == 401:
                wrong = f"the API key is missing or wrong: give api_key_file=<file> or set {VARIABLE}"
                raise UserError(f"{self.url}: {wrong}") from None
            raise ConnectionError(f"{self.url} refused: {status} {one_line(body)}") from None
        except (OSError, EOFError, WebSocketException) as error:
            raise ConnectionError(f"no policy server at {self.url}: {one_line(error)}") from None
        try:
            self.greeted(connection.recv(timeout=max(0.0, deadline_s - time.monotonic())))
        except BaseException as error:
            connection.close()
            if isinstance(error, (OSError, WebSocketException)):
                raise ConnectionError(f"{self.url} is no policy server: {one_line(error)}") from None
            raise
        return connection


class RemotePlanner(PolicyConnection):
    """A ``Planner`` whose policy runs on a server of this project; one row per call.

    bundle: the same bundle as the server's, on this machine; None takes the server's word for it. UserError for a
    server with another policy.
    """

    bundle: Bundle

    def __init__(
        self, url: str, api_key: str | None = None, timeout_s: float = 5.0, bundle: Bundle | None = None
    ) -> None:
        self._local = bundle
        super().__init__(url, api_key, timeout_s)
        self._spec = InputSpec(self.bundle)

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the chunk [1, H, A] in physical units; see ``Planner``.

        UserError for what the server refuses. ConnectionError for a server that is gone, late or sends what no policy
        of the bundle plans.
        """
        checked = self._spec.check(inputs)
        if len(checked["state"]) != 1:
            raise UserError(f"inputs: got {len(checked['state'])} rows, allowed: 1 for a policy server")
        max_bytes = 8 * self.bundle.horizon * self.bundle.action_dim + ALLOWANCE_BYTES
        message = self.ask(request_of(self.bundle, checked), max_bytes)
        try:
            chunk = message.get("actions") if isinstance(message, dict) else None
            rows = chunk[None] if isinstance(chunk, np.ndarray) else chunk
            return self._spec.check_chunk(rows, 1).astype(np.float32)  # a copy: the reply's memory is read-only
        except UserError as error:
            raise ConnectionError(f"{self.url}: {one_line(error)}") from None

    def greeted(self, greeting: str | bytes) -> None:
        """Keep the server's description. UserError if its policy is another one than the local bundle's."""
        try:
            described = parse_bundle(content_of(greeting, MAX_JSON_BYTES), "metadata")
        except UserError as error:
            raise ConnectionError(f"{self.url} is no policy server of this project: {one_line(error)}") from None
        self.bundle = self._local or described
        if described.digest != self.bundle.digest:
            hashes = f"it has SHA-256 {described.digest[:12]}..., the bundle here {self.bundle.digest[:12]}..."
            raise UserError(f"{self.url} serves another policy (task {described.origin.task}): {hashes}")
