"""A thread that makes calls for another one, which waits for them no longer than it wants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class OutOfTime(Exception):
    """A call is not done in time."""


class Apart:
    """A thread for the calls of another one. It does not keep the process from ending, whatever a call does."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def __call__(self, call: Callable[[], Any], seconds: float) -> Any:
        """Return the result of a call, or raise what it raises. OutOfTime if it is not done in so many seconds."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        try:
            return future.result(min(seconds, threading.TIMEOUT_MAX))
        except TimeoutError:
            if future.done():  # the call has raised it
                raise
            raise OutOfTime from None

    def close(self) -> None:
        """End the thread after the present call."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (order := self._calls.get()) is not None:
            future, call = order
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
