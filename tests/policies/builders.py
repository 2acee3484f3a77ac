"""Small policies and observations for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.registry import Entry
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies import POLICIES
from embodied.policies.dsrl import DSRLPolicy
from embodied.policies.flow.policy import FlowPolicy
from embodied.policies.gaussian import GaussianPolicy

SPEC = EnvSpec.of_sizes("test", state=6, privileged=3, action=2)
FLOW: dict[str, Any] = {
    "actor_hidden": (16, 16), "critic_hidden": (16,), "head_hidden": (16, 8), "horizon": 3, "execute": 3,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gaussian": {"actor_hidden": (16, 16), "critic_hidden": (16,), "horizon": 3, "execute": 3},
    "flow": FLOW,
    "flow, one step": FLOW | {"stochastic_steps": "one"},
    "flow, last step": FLOW | {"stochastic_steps": "last"},
    "flow, SDE": FLOW | {"exploration": "flow_sde"},
    "flow, SDE, one step": FLOW | {"exploration": "flow_sde", "stochastic_steps": "one"},
    "flow, SDE, last step": FLOW | {"exploration": "flow_sde", "stochastic_steps": "last"},
    "dsrl": FLOW | {"noise_hidden": (16,), "prediction": "velocity"},
}
"""Options by variant; the word before the comma is the policy's name."""


def entry(name: str) -> Entry[Callable[..., Policy]]:
    """The registry's entry of a variant's policy."""
    return POLICIES[name.split(",")[0]]


def build(name: str, seed: int = 0, spread: float = 0.3, **options: Any) -> GaussianPolicy | FlowPolicy | DSRLPolicy:
    """A small policy whose weights are moved away from their initial values by N(0, spread^2)."""
    torch.manual_seed(seed)
    policy = entry(name).build(SPEC, entry(name).config(**(SMALL[name] | options)))
    assert isinstance(policy, GaussianPolicy | FlowPolicy | DSRLPolicy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return policy


def observe(num: int, seed: int = 1) -> Obs:
    """Observations with features of very different scales."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(num, SPEC.state_dim, generator=generator) * torch.logspace(-2, 2, SPEC.state_dim) + 3.0
    return {"state": state, "privileged": torch.randn(num, SPEC.privileged_dim, generator=generator)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_gradient(policy: Policy, obs: Obs, chain: Tensor, seeds: int) -> None:
    """The gradient of likelihood and entropy, float64, is that of finite differences along random directions."""
    parameters = [p for key, p in policy.named_parameters() if p.requires_grad and not key.startswith("critic")]

    def total() -> Tensor:
        evaluation = policy.evaluate(obs, chain)
        return evaluation.log_prob_B.sum() + 0.3 * evaluation.entropy_B.sum()

    gradients = torch.autograd.grad(total(), parameters)
    for seed in range(seeds):
        directions = [torch.randn(p.shape, dtype=p.dtype, generator=generator(seed)) for p in parameters]
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
        values = []
        for epsilon in (1e-6, -2e-6, 1e-6):  # ends where it began
            with torch.no_grad():
                for p, direction in zip(parameters, directions, strict=True):
                    p.add_(epsilon * direction)
                values.append(float(total()))
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-5)
