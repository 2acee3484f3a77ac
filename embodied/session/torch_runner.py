"""Bundles in the layout of transformers, run by the policies that are registered here.

bundle ── TorchRunner ──► chunks in physical units, as PolicyRunner has them
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from embodied.core.errors import UserError, one_line
from embodied.core.graphs import Recorded
from embodied.deployment.bundle.description import POLICY_FILE
from embodied.deployment.bundle.format import MAX_JSON_BYTES, OPTIONS_FILE, STATISTICS_FILE, read_bundle, read_json
from embodied.deployment.bundle.runner import InputSpec
from embodied.deployment.bundle.torch_policy import PhysicalPlan, statistics_of
from embodied.session.factories import build_policy


class TorchRunner:
    """A ``Planner`` of a bundle in the layout of transformers, in this process.

    path: directory of the bundle; its hashes are checked. Its policy may be any registered one. device: where the
    policy runs. UserError for a bundle that is damaged or has another layout.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.path, self.bundle = path, read_bundle(path)
        if POLICY_FILE in self.bundle.files:
            raise UserError(f"bundle={path} is an ONNX model: PolicyRunner runs it")
        self.inputs, self.device = InputSpec(self.bundle), torch.device(device)
        options = read_json(path / OPTIONS_FILE, MAX_JSON_BYTES)
        if not isinstance(options, dict) or not isinstance(options.get("name"), str):
            raise UserError(f"{path / OPTIONS_FILE} is no section policy of a configuration: it has no name")
        spec = self.bundle.env_spec
        policy = build_policy(spec, options | {"pretrained": str(path)})
        try:
            statistics = load_file(path / STATISTICS_FILE)
        except SafetensorError as error:
            raise UserError(f"{path / STATISTICS_FILE} cannot be loaded: {one_line(error)}") from error
        needed = statistics_of(policy)
        if {name: value.shape for name, value in statistics.items()} != {n: v.shape for n, v in needed.items()}:
            raise UserError(f"{path / STATISTICS_FILE} does not fit this version of the code, or this policy")
        policy.load_state_dict(statistics, strict=False)
        plan = PhysicalPlan(policy, spec, tuple(self.inputs.shapes)).eval().to(self.device)
        self._names, self._plan = plan.names, Recorded(plan.forward, self.device, policy)

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        checked = self.inputs.check(inputs)
        with torch.no_grad():
            chunk = self._plan(*(torch.from_numpy(checked[name]).to(self.device) for name in self._names))
        return self.inputs.check_chunk(chunk.float().cpu().numpy(), len(checked["state"]))
