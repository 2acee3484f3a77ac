"""``plan`` of a policy as an ONNX model with inputs and outputs in physical units. Needs torch; robots do not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import Box, EnvSpec

OUTPUT = "actions"
TORCH_LOGGER = "torch.onnx._internal.exporter._registration"


class PhysicalPlan(nn.Module):
    """``Policy.plan`` between physical units: SI state in, commanded quantities out, clipped as an environment does.

    names: the inputs, in the order in which ``forward`` takes them; ``state`` and ``noise`` are among them.
    """

    state_scale: Tensor
    """Observed number per physical one, [S]."""
    action_scale: Tensor
    """Physical number per action, [A]."""
    action_offset: Tensor
    """Physical number at action 0, [A]."""

    def __init__(self, policy: Policy, spec: EnvSpec, names: tuple[str, ...]) -> None:
        """Wrap a policy. UserError if its actions are choices."""
        super().__init__()
        if not isinstance(spec.action, Box):
            raise UserError(f"task {spec.task} has choices for actions: only continuous actions can be exported")
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
            given = torch.arange(obs["prefix"].shape[1]) < obs["delay"][:, None]
            prefix = (obs["prefix"] - self.action_offset) / self.action_scale
            obs["prefix"] = prefix * given.unsqueeze(-1)  # the rows of a prefix that do not count are 0 in training
        return self.policy.plan(obs, noise).clamp(-1.0, 1.0) * self.action_scale + self.action_offset


def export_onnx(plan: PhysicalPlan, inputs: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write ``plan`` to ``path``. inputs: two or more rows of every input, by name; the number of rows stays free."""
    rows = torch.export.Dim("rows", min=1, max=4096)
    args = tuple(inputs[name] for name in plan.names)
    onnx_logger, torch_logger = logging.getLogger("onnxscript"), logging.getLogger(TORCH_LOGGER)
    level = onnx_logger.level
    onnx_logger.setLevel(logging.ERROR)
    torch_logger.addFilter(_not_about_torchvision)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                plan.eval(),
                args,
                input_names=list(plan.names),
                output_names=[OUTPUT],
                dynamic_shapes=(tuple({0: rows} for _ in args),),
                dynamo=True,
                verbose=False,
            )
    finally:
        onnx_logger.setLevel(level)
        torch_logger.removeFilter(_not_about_torchvision)
    program.model.metadata_props.update(metadata)
    program.save(str(path), external_data=False)


def _not_about_torchvision(record: logging.LogRecord) -> bool:
    """Refuse torch's notes that it skips the operators of torchvision, which no policy of ours uses."""
    return not record.getMessage().startswith("torchvision is not installed")
