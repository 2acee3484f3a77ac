"""Options of the flow policy that change how it learns, not what it is: annealed noise, checkpointed steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.errors import UserError
from policies import FlowConfig, FlowPolicy
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


def spread(flow: FlowPolicy, obs: dict[str, Tensor]) -> Tensor:
    """Standard deviation of the chain's steps around their means, per step [K]."""
    rows = len(obs["state"])
    chain = flow.act(obs, flow.sample_noise(rows, torch.Generator().manual_seed(2))).chain
    code = flow.denoiser.encode(flow.normalized_state(obs))
    _, mean, _ = flow.transition(code.unsqueeze(1), chain[:, :-1], slice(None))
    return (chain[:, 1:] - mean).std((0, 2, 3))


@pytest.mark.parametrize("exploration", ["flow_noise", "flow_sde"])
def test_noise_shrinks_to_its_final_share_and_stays(exploration: str) -> None:
    obs = observations(4000)
    annealed = policy(exploration=exploration, noise_anneal=5, noise_final=0.25, sigma_init=0.99, sigma_max=1.0)
    with torch.no_grad():
        before = spread(annealed, obs)
        for _ in range(5):
            annealed.update_normalizer({key: value[:0] for key, value in obs.items()})
        after = spread(annealed, obs)
        for _ in range(3):
            annealed.update_normalizer({key: value[:0] for key, value in obs.items()})
        later = spread(annealed, obs)
    torch.testing.assert_close(after / before, torch.full((4,), 0.25), atol=0.01, rtol=0)
    torch.testing.assert_close(later, after)


def test_how_far_the_noise_has_shrunk_travels_with_the_weights() -> None:
    learner, actor = (policy(noise_anneal=10, noise_final=0.5) for _ in range(2))
    learner.update_normalizer(observations(3))
    actor.load_state_dict(learner.state_dict())
    assert actor.log_shrink == learner.log_shrink < 0


def test_checkpointed_steps_have_the_same_gradient_and_keep_less() -> None:
    obs = observations(32)
    gradients, kept = [], []
    for options in ({}, {"checkpoint_steps": True}):
        flow = policy(denoise_steps=16, **options)
        chain = flow.act(obs, flow.sample_noise(32, torch.Generator().manual_seed(3))).chain
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


@pytest.mark.parametrize(
    "options",
    [{"noise_final": 0.0}, {"noise_final": 1.5}, {"noise_anneal": -1}, {"noise_anneal": 5, "noise_final": 0.04}],
)
def test_annealing_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"policy\.noise_"):
        policy(**options)
