"""The runner of a bundle in this process, by its layout. Only a bundle in the layout of transformers needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embodied.core.errors import UserError, one_line
from embodied.deployment.bundle.format import read_bundle
from embodied.deployment.bundle.runner import PolicyRunner

if TYPE_CHECKING:
    from embodied.session.torch_runner import TorchRunner


def open_runner(path: Path, device: str = "cpu", num_threads: int | None = None) -> PolicyRunner | TorchRunner:
    """Return the runner of a bundle. UserError if it is damaged, or cannot run here.

    device: of a bundle in the layout of transformers; an ONNX model runs on the CPU. num_threads: of one inference;
    None leaves those of torch as they are.
    """
    if read_bundle(path, with_policy=False).layout == "onnx":
        return PolicyRunner(path, num_threads or 1)
    try:
        import torch

        from embodied.session.torch_runner import TorchRunner
    except ImportError as error:
        raise UserError(f"bundle={path} needs torch and transformers: {one_line(error)}") from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={device}: torch finds no GPU here")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return TorchRunner(path, device)
