"""An option of the flow policy that changes how it learns, not what it is: checkpointed denoise steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.policies.config import FlowConfig
from embodied.policies.flow.policy import FlowPolicy
from tests.algos.fragments import SPEC

SMALL: dict[str, Any] = {"actor_hidden": (16,), "critic_hidden": (16,), "head_hidden": (64, 64)}


def policy(**options: Any) -> FlowPolicy:
    torch.manual_seed(0)
    return FlowPolicy(SPEC, FlowConfig(**{**SMALL, **options}))


def observations(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "state": torch.randn(rows, SPEC.state_dim, generator=generator),
        "privileged": torch.randn(rows, SPEC.privileged_dim, generator=generator),
    }


def test_checkpointed_steps_have_the_same_gradient_and_keep_less() -> None:
    obs = observations(32)
    gradients, kept = [], []
    for options in ({}, {"checkpoint_steps": True}):
        flow = policy(denoise_steps=16, **options)
        chain = flow.act(obs, torch.randn(32, *flow.noise_shape, generator=torch.Generator().manual_seed(3))).chain
        saved: dict[int, int] = {}

        def remember(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            evaluation = flow.evaluate(obs, chain)
            kept.append(sum(saved.values()))
        (evaluation.log_prob_B.mean() + evaluation.entropy_B.mean()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)
    assert kept[1] < kept[0] / 4
