"""Serve a bundle's policy to robots: ``python -m embodied.serve bundle=<bundle dir> [key=value ...]``

  port=8000                   port; 0 takes a free one
  host=127.0.0.1              address; another one than this machine's own needs a key
  api_key_file=<file>         clients must show the key in this file, or in the environment variable EMBODIED_API_KEY
  insecure=true               let other machines connect without a key
  max_batch=32                largest number of requests that are planned in one call
  max_clients=64              largest number of connected clients
  idle_s=1800                 disconnect a client without a request for so long
  num_threads=1               threads of the inference
  device=cpu                  cuda for a bundle in the layout of transformers, which needs torch; ONNX runs on the CPU

The protocol is openpi's: its clients work unchanged (docs/sim_to_real.md). The connection is not encrypted; use a
tunnel or a proxy with TLS on networks that you do not trust. GET /healthz answers 200. Press Ctrl-C to stop. Last line
of stdout: {"bundle", "requests", "errors", "clients", "refused", "batches", "largest_batch", "port", "duration_s"}.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.core.errors import UserError
from embodied.core.user_files import sha256
from embodied.deployment.bundle.format import BUNDLE_FILE
from embodied.deployment.bundle.runner import PolicyRunner, check_parity
from embodied.deployment.options import ServeOptions
from embodied.deployment.serving.protocol import require_packages
from embodied.deployment.validation import parse_words
from embodied.session.command import Stopped, run_command
from embodied.session.deployed.runners import open_runner

if TYPE_CHECKING:  # it imports torch, which a machine with an ONNX bundle does not need
    from embodied.session.torch_runner import TorchRunner

GPU_TOLERANCE = 1e-2  # largest difference of a GPU's plans from the recorded ones, in units of the action's scale


def run_server(argv: Sequence[str]) -> dict[str, Any]:
    """Serve until a signal comes, then raise ``Stopped`` with the command's result. UserError for bad input."""
    options = parse_words(ServeOptions, argv)
    require_packages("embodied.serve")
    runner = runner_of(options)
    # a GPU rounds convolutions to TF32; the first inference is slow, and no client should wait for it
    check_parity(runner, runner.path, GPU_TOLERANCE if options.device == "cuda" else None)
    raise Stopped({"bundle": options.bundle, **asyncio.run(serve_until_stopped(runner, options))})


def runner_of(options: ServeOptions) -> PolicyRunner | TorchRunner:
    """Return the runner of the bundle. UserError if it cannot run here, or not on this device."""
    runner = open_runner(Path(options.bundle), options.device, options.num_threads)
    if options.device != "cpu" and isinstance(runner, PolicyRunner):
        raise UserError(f"device={options.device}: bundle={runner.path} is an ONNX model, which runs on the cpu")
    return runner


async def serve_until_stopped(runner: PolicyRunner | TorchRunner, options: ServeOptions) -> dict[str, Any]:
    """Serve until SIGINT or SIGTERM; return what was done. A second signal ends the process at once."""
    from embodied.deployment.serving.server import PolicyServer  # needs websockets

    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        print("stopping", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    server, began_s = PolicyServer(runner, options), time.monotonic()
    async with server.listening() as port:
        print(greeting(runner, options, port), file=sys.stderr, flush=True)
        await stop.wait()
    return {**server.result(), "port": port, "duration_s": round(time.monotonic() - began_s, 3)}


def greeting(runner: PolicyRunner | TorchRunner, options: ServeOptions, port: int) -> str:
    """Return what is served, where, and to whom, in lines."""
    origin, host = runner.bundle.origin, f"[{options.host}]" if ":" in options.host else options.host
    lines = [
        f"serving {origin.policy} for {origin.task} from {runner.path}",
        f"{BUNDLE_FILE} has SHA-256 {sha256(runner.path / BUNDLE_FILE)}",
        f"listening on ws://{host}:{port}",
    ]
    if not options.is_loopback and options.api_key is None:
        lines.append("warning: whoever reaches this port commands robots (insecure=true)")
    if not options.is_loopback:
        lines.append("warning: the connection is not encrypted")
    return "\n".join(lines)


main = partial(run_command, run_server, __doc__, first="bundle")


if __name__ == "__main__":
    sys.exit(main())
