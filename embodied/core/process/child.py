"""Child processes: start one, talk to it, notice its death, end it.

    parent: ChildObject("package.module:Class")        child: python -m embodied.core.process.child <socket> <pipe> ...
            send("method", arguments) ───────────►            Class().method(*arguments)
            receive()                 ◄───────────            its result, or its UserError

A child ends with its parent, also in the middle of a call: a thread watches a pipe that only the parent holds open.
Signals of the terminal do not reach it. Pickles are only read from a socket that no other process has.
"""

import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from embodied.core.errors import UserError, one_line

CLOSE_S = 10.0  # how long a child may take to end


class Builder:
    """The process that built environments, whose threads a fork lacks: it alone may step them unless ``can_fork``."""

    def __init__(self, can_fork: bool = False) -> None:
        self._process, self._can_fork = os.getpid(), can_fork

    @property
    def here(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise UserError in a process that was forked from it: a step would hang, or step the parent's envs."""
        if not (self.here or self._can_fork):
            cure = "build them in the process that steps them, or start it by multiprocessing's method 'spawn'"
            raise UserError(f"process {self._process} built these environments and was forked: {cure}")


class ChildDied(ConnectionError):
    """The child process has ended. returncode: its exit code, or minus the signal that killed it."""

    def __init__(self, name: str, returncode: int, last_line: str) -> None:
        self.how = f"by {signal.Signals(-returncode).name}" if returncode < 0 else f"with exit code {returncode}"
        super().__init__(f"the process of {name} ended {self.how}: {last_line or 'it printed nothing'}")
        self.returncode, self.last_line = returncode, last_line


class ChildProcess:
    """A process ``python -m <module> <socket> <pipe> <words>``, which calls ``end_with_parent(<pipe>)``.

    It answers calls of methods over the socket. name: for messages. pass_fds: further descriptors that it inherits.
    log: keep what it prints for ``ChildDied``; else it is printed to stderr.
    """

    def __init__(self, module: str, *words: str, name: str, pass_fds: Sequence[int] = (), log: bool = True) -> None:
        self.name, self._builder = name, Builder()
        self._log = tempfile.TemporaryFile() if log else None  # noqa: SIM115 (open as long as the child)
        output = 2 if self._log is None else self._log
        # its torch must not compete with that of the other children, and it imports what this process imports
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        watched, held_open = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(watched), *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ,
                pass_fds=[theirs.fileno(), watched, *pass_fds], start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(held_open)
            self._connection.close()
            raise
        finally:
            os.close(watched)
            theirs.close()
        self._kill = weakref.finalize(self, _kill, self.process, held_open, self._builder)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, method: str, *arguments: Any) -> None:
        """Ask for a call of a method; ``receive`` returns its result. ChildDied if the process has ended."""
        self._builder.check()
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self.death() from None

    def receive(self, limit_s: float | None = None) -> Any:
        """Return the result. UserError that the method raised, ChildDied, or ConnectionError after ``limit_s``."""
        try:
            silent = limit_s is not None and not self._connection.poll(limit_s)
            result = None if silent else self._connection.recv()
        except (EOFError, OSError):
            raise self.death() from None
        if silent:
            raise ConnectionError(f"the process of {self.name} does not answer")
        if isinstance(result, UserError):
            raise result
        return result

    def call(self, method: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """Call a method and wait for its result; errors as in ``send`` and ``receive``."""
        self.send(method, *arguments)
        return self.receive(limit_s)

    def wait(self) -> int:
        """Wait until the process has ended, kill it after ``CLOSE_S``, and return its exit code."""
        try:
            return self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def death(self) -> ChildDied:
        """Return the error for a process that has closed its end of the socket, so that it has ended or is about to."""
        returncode, last_line = self.wait(), ""
        if self._log is not None and not self._log.closed:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").splitlines()
            last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ChildDied(self.name, returncode, last_line)

    def close(self) -> None:
        """End the process: it ends by itself, or is killed after ``CLOSE_S``. More calls do nothing."""
        self._connection.close()
        if self._builder.here:
            self.wait()
            self.kill()

    def kill(self) -> None:
        self._kill()
        if self._log is not None:
            self._log.close()


def _kill(process: subprocess.Popen[bytes], held_open: int, builder: Builder) -> None:
    if builder.here:
        process.kill()
        process.wait()
        os.close(held_open)


def end_with_parent(pipe: int) -> None:
    """Let a thread end this process at once when the parent has ended, also in the middle of a call."""

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class ChildObject(ChildProcess):
    """An object in a child process, for a simulator that is slow in Python or that can crash.

    target: its class, ``package.module:Class``; a method ``close`` of it is called at the end. bare: a package whose
    ``__init__`` is left out until the first call, so that the child does not import all that the package does.
    """

    def __init__(self, target: str, *, bare: str = "", pass_fds: Sequence[int] = (), log: bool = True) -> None:
        super().__init__("embodied.core.process.child", target, bare, name=target, pass_fds=pass_fds, log=log)


def serve(connection: Connection, target: str, bare: str) -> None:
    """Answer the parent's calls until it closes the connection. Errors other than UserError end the process."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent ends an iteration after them, and closes the connection
        signal.signal(number, signal.SIG_IGN)
    module, _, name = target.partition(":")
    with _without_init(bare):
        thing = getattr(importlib.import_module(module), name)()
        call = _next(connection)
    try:
        while call is not None:
            method, arguments = call
            result: Any
            try:
                result = getattr(thing, method)(*arguments)
            except UserError as error:
                result = UserError(one_line(error))
            connection.send(result)
            call = _next(connection)
    except ConnectionError:  # the parent has closed it in the middle of a call
        pass
    finally:
        getattr(thing, "close", lambda: None)()


def _next(connection: Connection) -> Any:
    """Return the next call, a method's name and arguments; None if the parent has closed the connection."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


@contextmanager
def _without_init(package: str) -> Iterator[None]:
    """Let an empty module stand for ``package``, below which its modules are found; "": do nothing."""
    spec = importlib.util.find_spec(package) if package else None
    if spec is None:
        yield
        return
    stub = ModuleType(package)
    stub.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = stub
    yield
    del sys.modules[package]  # a simulator may import the real one


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])), *sys.argv[3:])
