"""Policies in torch with inputs and outputs in physical units, and bundles in the layout of transformers.

    policy ── write_model ──► bundle: config.json  model.safetensors (or shards)  tokenizer  preprocessor_config.json
                                      policy.json           options of the policy
                                      statistics.safetensors  its normaliser

embodied.session.torch_runner runs such a bundle. The layout is for policies that are too large for one ONNX file
(docs/sim_to_real.md).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import Box, EnvSpec
from embodied.deployment.bundle.format import OPTIONS_FILE, STATISTICS_FILE

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
        self.register_buffer("state_scale", torch.from_numpy(spec.state_scale))
        self.register_buffer("action_scale", torch.from_numpy(spec.action.scale))
        self.register_buffer("action_offset", torch.from_numpy(spec.action.offset))

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
    """Write what a runner needs. UserError if the policy wraps no model. options: section policy of the run."""
    if policy.library is None:
        raise UserError(f"layout=transformers: policy {options['name']} wraps no model of transformers, allowed: onnx")
    policy.save_pretrained(path)
    (path / OPTIONS_FILE).write_text(json.dumps(dict(options) | MERGED, indent=1) + "\n", encoding="utf-8")
    save_file(statistics_of(policy), path / STATISTICS_FILE)


def statistics_of(policy: Policy) -> dict[str, Tensor]:
    """Return the buffers of a policy that are saved with it, without those of the critic: of its normalisers."""
    weights = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    unused = policy.not_imitated or ()
    return {
        name: value.contiguous()
        for name, value in policy.state_dict().items()
        if name not in weights and not name.startswith(unused)
    }
