"""Shared by all commands: one JSON line on stdout, all other output on stderr, exit codes.

0 success, 1 a crash (traceback) or the emergency key on a robot's way home, 2 bad input (message only; with the result
where the input was examined), 130 stopped by Ctrl-C, SIGTERM or a closed terminal, 141 broken pipe, such as of
``| head`` (silent).

Shell and system may both send SIGHUP for a closed terminal, so only the first SIGHUP counts. ``nohup`` ignores it.
"""

import errno
import fcntl
import importlib.metadata
import json
import os
import select
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import embodied
from embodied.core.process.interrupts import INTERRUPTED, raise_on_interrupt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
"""Errors of a disk; other errors of files are bugs."""
UNREAD = 141
"""Exit code of a command with a broken pipe: 128 + SIGPIPE, as shells show it for other programs."""
Options = TypeVar("Options", bound="DataclassInstance")
Handler = Callable[[int, FrameType | None], None]
Work = Callable[[Any], dict[str, Any]]
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = "stopping: saving a checkpoint (Ctrl-C again: stop now without saving)"
HANGS_S = 8.0  # how long the parts of an interrupted run may take to end


def check_installation() -> str | None:
    """Return why the imported ``embodied`` is not this package alone, or None if it is (``embodied/__init__.py``)."""
    cure = "Cure: pip uninstall -y embodied embodied-rl, then install embodied-rl again, in an environment of its own."
    here = Path(embodied.__file__).resolve()
    if getattr(embodied, "__distribution__", None) != "embodied-rl":
        return f"{embodied.__file__} belongs to another project that is also called 'embodied'. {cure}"
    try:
        other = importlib.metadata.distribution("embodied")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(other.locate_file("embodied/__init__.py"))).resolve() == here:
        return f"pip merged another project called 'embodied' {other.version} into {here.parent}. {cure}"
    return None


class Failed(Exception):
    """Raised by a command that failed, with the reason; its ``result`` is printed.

    code: exit code; with another one than 2 the reason is a verdict, which is not called an error.
    """

    def __init__(self, reason: str, result: dict[str, Any], code: int = 2) -> None:
        super().__init__(reason)
        self.result, self.code = result, code


class Stopped(Exception):
    """Raised by a command that a signal ended in good order; ``result`` is still printed."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("stopped by a signal")
        self.result = result


def run_command(
    command: Callable[[Sequence[str]], dict[str, Any]],
    usage: str | None,
    argv: Sequence[str] | None = None,
    first: str | None = None,
) -> int:
    """Run ``command(argv)``, print its result as the last line of stdout and return the exit code.

    Meanwhile all output to stdout goes to stderr. usage: text that ``--help`` prints. argv: None is ``sys.argv[1:]``.
    first: key of the first word if that has none, as ``task`` of a command that is mostly given a task.
    """
    _open_streams()
    try:
        return _run(command, usage, with_first_key(sys.argv[1:] if argv is None else argv, first))
    except (BrokenPipeError, SystemExit):  # rich exits where others raise
        unread = [number for number in (1, 2) if _has(select.POLLERR, number)]
        if not unread:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in unread:  # otherwise the flush at the end of the process fails again
            os.dup2(nowhere, number)
        os.close(nowhere)
        return UNREAD


def split_words(
    words: Mapping[str, Any], options: type[Options], others: Collection[str]
) -> tuple[Options, dict[str, Any]]:
    """Return a command's options, and its other words, which configure a run.

    options: a ``config_dataclass``. others: how the other keys may begin, before a dot. UserError for an unknown key,
    and for a bad option.
    """
    from embodied.core.config import nest
    from embodied.core.errors import unknown_name
    from embodied.core.options import from_mapping

    own = {field.name for field in fields(options)}
    for key in words:
        if key not in own and key.partition(".")[0] not in others:
            raise unknown_name("key", key, {*own, *others})
    given = from_mapping(options, nest({key: value for key, value in words.items() if key in own}))
    return given, {key: value for key, value in words.items() if key not in own}


def command(first: str | None = None) -> Callable[[Work], Callable[..., int]]:
    """Make the main function of a command from a function that takes its ``options``, a ``config_dataclass``.

    See ``run_command``, whose usage is the text at the top of the command's file.
    """

    def main_of(work: Work) -> Callable[..., int]:
        def run(words: Sequence[str]) -> dict[str, Any]:
            from embodied.core.config import nest, parse_overrides
            from embodied.core.options import from_mapping

            return work(from_mapping(get_type_hints(work)["options"], nest(parse_overrides(words))))

        @wraps(work)
        def main(argv: Sequence[str] | None = None) -> int:
            return run_command(run, sys.modules[work.__module__].__doc__, argv, first)

        return main

    return main_of


def with_first_key(words: Sequence[str], first: str | None) -> Sequence[str]:
    """Return words of which the first is ``<first>=<word>`` if it has no key and is no flag."""
    if first and words and "=" not in words[0] and words[0] != "help" and not words[0].startswith("-"):
        return [f"{first}={words[0]}", *words[1:]]
    return words


def _open_streams() -> None:
    """Redirect standard streams that are closed (``2>&-``) or cannot be written to ``/dev/null``.

    Otherwise a file that is opened later gets the number of the stream, and with it the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            if not number or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                os.fstat(number)
                continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def _has(event: int, number: int) -> bool:
    """Return whether a stream has an event of ``select.poll``. POLLERR: nobody reads it. POLLHUP: it was closed."""
    poll = select.poll()
    poll.register(number, 0)
    return any(found & event for _, found in poll.poll(0))


def _run(command: Callable[[Sequence[str]], dict[str, Any]], usage: str | None, argv: Sequence[str]) -> int:
    problem = check_installation()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if any(word in ("-h", "--help", "help") for word in argv):
        print(usage, flush=True)
        return 0
    from embodied.core.errors import UserError  # after the check: a merged install may lack it
    from embodied.core.user_files import name_words

    code = 0
    try:
        raise_on_interrupt()
        with redirect_stdout(sys.stderr):
            result = command(name_words(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        result, code = stopped.result, INTERRUPTED
    except Failed as failed:
        result, code = failed.result, failed.code
        print(f"error: {failed}" if code == 2 else failed, file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and (_has(select.POLLERR, 1) or _has(select.POLLERR, 2)):
            raise
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            print(f"error: {error.strerror}: {error.filename or 'the output directory'}", file=sys.stderr)
            return 2
        traceback.print_exc()  # a bug, whatever it is
        return 1
    sys.stderr.flush()
    print(json.dumps(result), flush=True)
    return code


@contextmanager
def stop_on_signals(note: str = SAVING, signals: Sequence[signal.Signals] = STOPPING) -> Iterator[threading.Event]:
    """Yield an event that the first of ``signals`` sets; a second one has its usual effect.

    note: written to stderr at the first signal. Only the main thread gets signals; in any other thread the event stays
    unset.
    """
    stop, begun = threading.Event(), False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal begun
        if begun:  # within the call below, whose lock this thread holds: a closed terminal sends two at once
            return
        begun = True
        stop.set()
        _hang_up(number)
        restore()
        with suppress(OSError):  # print() is not reentrant
            os.write(2, f"{note}\n".encode())

    with _handling(on_signal, *signals) as restore:
        yield stop


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, which raises KeyboardInterrupt; only the main thread can."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        _hang_up(number)
        raise KeyboardInterrupt

    with _handling(on_signal, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handling(handler: Handler, *numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """Handle signals in the main thread, except an ignored SIGHUP; yield what restores the handlers of before."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def restore() -> None:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, earlier)

    for number in before:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()


def _hang_up(number: int) -> None:
    """After SIGHUP, ignore later ones, and redirect the streams of the closed terminal to ``/dev/null``."""
    if number != signal.SIGHUP:
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if _has(select.POLLHUP, stream) and stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def ending_in_time() -> Iterator[None]:
    """End the process if the block takes longer than ``HANGS_S``, because a component hangs."""

    def end() -> None:
        os.write(2, b"interrupted; a component did not shut down in time\n")
        os._exit(INTERRUPTED)

    last_resort = threading.Timer(HANGS_S, end)
    last_resort.daemon = True
    last_resort.start()
    try:
        yield
    finally:
        last_resort.cancel()
