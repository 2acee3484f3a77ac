"""Compile the kernels of a function on all cores. Warp compiles each at its first launch, one after the other.

The function is called with launches that are noted instead of made. Then the noted modules are built side by side, and
kept by Warp for the next run.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

SILENT_S = 3.0  # between two lines


def compile_kernels(warp: Any, run: Callable[[], object], device: Any, cores: int) -> None:
    """Compile what ``run`` launches on the device of Warp. It must not depend on what its kernels compute."""
    with noting(warp, device) as noted:
        run()
    told_s = time.monotonic()
    with ThreadPoolExecutor(cores) as executor:
        building = [executor.submit(module.load, device, block_dim) for module, block_dim in noted]
        for done, built in enumerate(as_completed(building), 1):
            built.result()
            if time.monotonic() > told_s + SILENT_S:
                print(f"compiling the kernels of sim=warp: {done} of {len(noted)}", file=sys.stderr, flush=True)
                told_s = time.monotonic()


@contextmanager
def noting(warp: Any, device: Any) -> Iterator[dict[tuple[Any, int], None]]:
    """Note the modules of this thread's launches, with the threads of a block, instead of making them."""
    noted: dict[tuple[Any, int], None] = {}
    normal = 1 if device.is_cpu else 256  # of a launch that does not say

    def note(kernel: Any, *args: Any, block_dim: int = 0, **kwargs: Any) -> None:
        if not kernel.is_generic:  # its types follow from the arguments
            noted[kernel.module, block_dim if block_dim and not device.is_cpu else normal] = None

    def once(condition: Any, while_body: Callable[..., None], **kwargs: Any) -> None:
        while_body(**kwargs)

    thread = threading.get_ident()
    kept = {name: getattr(warp, name) for name in ("launch", "launch_tiled", "capture_while")}

    def here(name: str, function: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() == thread else kept[name])(*args, **kwargs)

        return call

    try:
        for name in kept:
            setattr(warp, name, here(name, once if name == "capture_while" else note))
        yield noted
    finally:
        for name, function in kept.items():
            setattr(warp, name, function)
