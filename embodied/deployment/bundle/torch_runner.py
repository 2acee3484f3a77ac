"""Policies in torch with inputs and outputs in physical units, and bundles in the layout of transformers.

    policy ── write_model ──► bundle: config.json  model.safetensors (or shards)  tokenizer  preprocessor_config.json
                                      policy.json           options of the policy
                                      statistics.safetensors  its normaliser
    bundle ── TorchRunner ──► chunks in physical units, as PolicyRunner has them

The layout is for policies that are too large for one ONNX file (docs/sim_to_real.md).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodied.core.errors import UserError, one_line
from embodied.core.graphs import Recorded
from embodied.core.policy import Policy
from embodied.core.spec import Box, EnvSpec
from embodied.deployment.bundle.description import POLICY_FILE
from embodied.deployment.bundle.format import MAX_JSON_BYTES, OPTIONS_FILE, STATISTICS_FILE, read_bundle, read_json
from embodied.deployment.bundle.runner import InputSpec

PolicyBuilder = Callable[[EnvSpec, Mapping[str, Any]], Policy]
"""Builds a policy with initial weights from a spec and a section ``policy`` of a configuration."""
MERGED: dict[str, Any] = {"pretrained": None, "lora_rank": 0, "model": {}}
"""Options of a policy that ``save_pretrained`` has carried out: adaptations are merged, config.json has all sizes."""


class PhysicalPlan(nn.Module):
    """``Policy.plan`` between physical units: SI state in, commanded quantities out, clipped as an environment does.

    names: the inputs, in the order in which ``forward`` takes them; ``state`` and ``noise`` are among them.
    """

    state_scale: Tensor
    """Observed number per physical one, [S]."""
    action_scale: Tensor
    action_offset: Tensor
    """Physical number per action, and at action 0, [A]."""

    def __init__(self, policy: Policy, spec: EnvSpec, names: tuple[str, ...]) -> None:
        super().__init__()
        assert isinstance(spec.action, Box), "check_exportable comes first"
        self.policy, self.names = policy, names
        scale = [term.scale for term in spec.state for _ in range(term.size)]
        self.register_buffer("state_scale", torch.tensor(scale))
        self.register_buffer("action_scale", torch.tensor([term.scale for term in spec.action.terms]))
        self.register_buffer("action_offset", torch.tensor([term.offset for term in spec.action.terms]))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the chunk [N, H, A] in physical units for inputs in the order of ``names``."""
        obs = dict(zip(self.names, inputs, strict=True))
        noise = obs.pop("noise")
        obs["state"] = obs["state"] * self.state_scale
        if "prefix" in obs:
            given = torch.arange(obs["prefix"].shape[1], device=obs["delay"].device) < obs["delay"][:, None]
            prefix = (obs["prefix"] - self.action_offset) / self.action_scale
            obs["prefix"] = prefix * given.unsqueeze(-1)  # the rows of a prefix that do not count are 0 in training
        return self.policy.plan(obs, noise).clamp(-1.0, 1.0) * self.action_scale + self.action_offset


def write_model(path: Path, policy: Policy, options: Mapping[str, Any]) -> None:
    """Write what ``TorchRunner`` needs. UserError if the policy wraps no model. options: section policy of the run."""
    if policy.library is None:
        raise UserError(f"layout=transformers: policy {options['name']} wraps no model of transformers, allowed: onnx")
    policy.save_pretrained(path)
    (path / OPTIONS_FILE).write_text(json.dumps(dict(options) | MERGED, indent=1) + "\n", encoding="utf-8")
    save_file(_statistics(policy), path / STATISTICS_FILE)


def _statistics(policy: Policy) -> dict[str, Tensor]:
    """Return the buffers of a policy that are saved with it, without those of the critic: of its normalisers."""
    weights = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    unused = policy.not_imitated or ()
    return {
        name: value.contiguous()
        for name, value in policy.state_dict().items()
        if name not in weights and not name.startswith(unused)
    }


class TorchRunner:
    """A ``Planner`` of a bundle in the layout of transformers, in this process.

    path: directory of the bundle; its hashes are checked. build: ``embodied.session.factories.build_policy``, which
    knows the policies by name. device: where the policy runs. UserError for a bundle that is damaged or has another
    layout.
    """

    def __init__(self, path: Path, build: PolicyBuilder, device: str = "cpu") -> None:
        self.path, self.bundle = path, read_bundle(path)
        if POLICY_FILE in self.bundle.files:
            raise UserError(f"bundle={path} is an ONNX model: PolicyRunner runs it")
        self.inputs, self.device = InputSpec(self.bundle), torch.device(device)
        options = read_json(path / OPTIONS_FILE, MAX_JSON_BYTES)
        if not isinstance(options, dict) or not isinstance(options.get("name"), str):
            raise UserError(f"{path / OPTIONS_FILE} is no section policy of a configuration: it has no name")
        spec = self.bundle.env_spec
        policy = build(spec, options | {"pretrained": str(path)})
        try:
            statistics = load_file(path / STATISTICS_FILE)
        except SafetensorError as error:
            raise UserError(f"{path / STATISTICS_FILE} cannot be loaded: {one_line(error)}") from error
        needed = _statistics(policy)
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
