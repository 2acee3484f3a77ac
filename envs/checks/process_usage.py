"""Memory, files, threads and processes of this process and its child processes (Linux)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_bytes() -> int:
    """Return the resident memory of this process and all its descendants, bytes."""
    total = 0
    for process in (os.getpid(), *_descendants(os.getpid())):
        try:
            total += int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return total


def counts() -> dict[str, int]:
    """Return the numbers of threads and open files of this process, and of the processes that descend from it."""
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": len(_descendants(os.getpid())),
    }


def _descendants(process: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
