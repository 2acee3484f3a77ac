"""Bundles in the layout of transformers, run by the policies that are registered here."""

from pathlib import Path

from embodied.deployment.bundle import torch_runner
from embodied.session.factories import build_policy


class TorchRunner(torch_runner.TorchRunner):
    """See ``embodied.deployment.bundle.torch_runner.TorchRunner``. Its policy may be any registered one."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        super().__init__(path, build_policy, device)
