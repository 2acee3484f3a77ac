"""Shared by all commands: one JSON line on stdout, all other output on stderr, exit codes.

0 success, 1 a crash (traceback) or a negative verdict (with its result), 2 bad input (message only), 130 stopped by
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import embodied
from embodied.core.interrupts import INTERRUPTED, raise_on_interrupt

DISK_ERRORS = (  # what a disk refuses; other errors of files are bugs
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
)  # fmt: skip


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
    """Raised by a command whose verdict is negative; ``result`` is still printed, and the exit code is 1."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("the verdict is negative")
        self.result = result


class Stopped(Exception):
    """Raised by a command that a signal ended in good order; ``result`` is still printed."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("stopped by a signal")
        self.result = result


def run_command(command: Callable[[Sequence[str]], dict[str, Any]], usage: str | None, argv: Sequence[str]) -> int:
    """Run ``command(argv)``, print its result as the last line of stdout and return the exit code.

    Meanwhile all output to stdout goes to stderr. usage: text that ``--help`` prints.
    """
    problem = check_installation()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if any(word in ("-h", "--help", "help") for word in argv):
        print(usage)
        return 0
    from embodied.core.errors import UserError  # after the check: a merged install may lack it

    code = 0
    try:
        raise_on_interrupt()
        with redirect_stdout(sys.stderr):
            result = command(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            traceback.print_exc()
            return 1
        print(f"error: {error.strerror}: {error.filename or 'the output directory'}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        result, code = stopped.result, INTERRUPTED
    except Failed as failed:
        result, code = failed.result, 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return 1
    sys.stderr.flush()
    print(json.dumps(result), flush=True)
    return code
