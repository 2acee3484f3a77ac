"""A Python process for a simulator that is slow in Python, or that can crash.

    parent: Child("package.module:Class")          child: python -m embodied.envs.adapters.child 3 package.module:Class
            send("method", arguments) ───────────►        Class().method(*arguments)
            receive()                 ◄───────────        its result, or its UserError

The child ends with its parent. Whatever it prints goes to a temporary file. Only pickles of these two processes are
read, over a socket that no other process has.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from embodied.core.errors import UserError, one_line
from embodied.envs.base.forks import Builder

CLOSE_S = 5.0  # how long a child may take to end


class ChildDied(RuntimeError):
    """The child process has ended. returncode: its exit code, or minus the signal that killed it."""

    def __init__(self, target: str, returncode: int, last_line: str) -> None:
        how = f"by {signal.Signals(-returncode).name}" if returncode < 0 else f"with exit code {returncode}"
        super().__init__(f"the process of {target} ended {how}: {last_line}")
        self.returncode, self.last_line = returncode, last_line


class Child:
    """One child process with one object in it. target: the object's class, ``package.module:Class``."""

    def __init__(self, target: str) -> None:
        ours, theirs = socket.socketpair()
        self.target, self._builder = target, Builder()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child)
        # its torch must not compete with that of the other children, and it imports what this process imports
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "embodied.envs.adapters.child", str(theirs.fileno()), target],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=[theirs.fileno()], env=environ,
            )  # fmt: skip
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, method: str, *arguments: Any) -> None:
        """Ask for a call of a method; ``receive`` returns its result. ChildDied if the process has ended."""
        self._builder.check()
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """Wait for the result of the call. UserError if the method raised one, ChildDied if the process ended."""
        try:
            result = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, UserError):
            raise result
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and wait for its result; errors as in ``send`` and ``receive``."""
        self.send(method, *arguments)
        return self.receive()

    def close(self) -> None:
        """End the process; more calls do nothing."""
        self._connection.close()
        if not self._builder.here:
            return
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _death(self) -> ChildDied:
        """Return the error for a process that has closed the connection."""
        returncode = self._process.wait()  # its end of the connection is closed, so it is about to end
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        printed = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return ChildDied(self.target, returncode, printed)


def serve(connection: Connection, target: str) -> None:
    """Answer the parent's calls until it closes the connection. Errors other than UserError end the process."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent ends an iteration after them, and closes the connection
        signal.signal(number, signal.SIG_IGN)
    module, _, name = target.partition(":")
    thing = getattr(importlib.import_module(module), name)()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        result: Any
        try:
            result = getattr(thing, method)(*arguments)
        except UserError as error:
            result = UserError(one_line(error))
        connection.send(result)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
