"""A process that steps environments of gymnasium: ``python -P worker.py <fd> <fd> <fd>``, for ``processes``.

It imports ``embodied.envs.adapters`` without ``embodied.envs``, which would load MuJoCo and torch. It ends when its
parent does, however that ends: it waits for orders on one pipe, and a thread of it watches another one that only the
parent holds open.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any


def watch(descriptor: int) -> None:
    """End this process at once when the parent has ended, also in the middle of a step."""
    os.read(descriptor, 1)
    os._exit(1)


def serve(orders: Any, memory_descriptor: int) -> None:
    """Build the environments of the first message, then do what messages ``(method, *arguments)`` order."""
    package = ModuleType("embodied.envs")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["embodied.envs"] = package
    from embodied.core.errors import UserError
    from embodied.envs.adapters.gym.rows import LocalRows

    source, layout, num_envs, ids, render = orders.recv()
    del sys.modules["embodied.envs"]  # an environment may import the real one
    memory = mmap.mmap(memory_descriptor, layout.offsets(num_envs)[1])
    rows = None
    try:
        rows = LocalRows(source, layout.arrays(num_envs, memory), ids, render)
        orders.send(("done", None))
        while True:
            method, *arguments = orders.recv()
            try:
                orders.send(("done", getattr(rows, method)(*arguments)))
            except UserError as error:
                orders.send(("failed", str(error)))
    except UserError as error:
        orders.send(("failed", str(error)))
    except (EOFError, ConnectionError):  # the parent has closed the pipe, or ended
        pass
    finally:
        if rows is not None:
            rows.close()


def main() -> None:
    orders, lifeline, memory = map(int, sys.argv[1:])
    threading.Thread(target=watch, args=(lifeline,), daemon=True).start()
    serve(Connection(orders), memory)


if __name__ == "__main__":
    main()
