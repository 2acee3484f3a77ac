"""Memory, files, threads and processes of this process and its child processes (Linux)."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_bytes() -> int:
    """Return the resident memory of this process and all its descendants, bytes."""
    total = 0
    for process in (os.getpid(), *_descendants(os.getpid())):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            total += int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    return total


def counts() -> dict[str, int]:
    """Return the numbers of threads and open files of this process, and of the processes that descend from it."""
    processes = len(list(_descendants(os.getpid())))
    return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")), "processes": processes}


def _descendants(process: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)
