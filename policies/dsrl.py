"""Steering a frozen flow policy by its initial noise."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.options import Positive, Widths, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from policies.flow.policy import FlowConfig, FlowPolicy
from policies.gaussian import GaussianChunk
from policies.networks import mlp


@config_dataclass
class DSRLConfig(FlowConfig):
    """Options of DSRLPolicy: those of the actor on the noise, and those of the frozen flow, as its own run had them.
    The flow's exploration has no effect here."""

    noise_hidden: Widths = (128, 128)
    """Widths of the hidden layers of the actor on the noise."""
    noise_bound: Positive = 2.0
    """Greatest mean of the noise, which in imitation was a standard normal."""
    noise_std: Positive = 0.5
    """Initial standard deviation around that mean."""
    noise_std_min: Positive = 0.1
    """Lower bound of that standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_std < self.noise_std_min:
            raise UserError(f"noise_std: got {self.noise_std}, allowed: at least noise_std_min={self.noise_std_min}")


class DSRLPolicy(GaussianChunk):
    """A Gaussian over the initial noise w [H, A] of a flow policy, ``base``, whose weights never change.

    Diffusion steering (DSRL, Wagenmaker et al. 2025): the base is a map from (state, w) to a chunk, here its ODE, and
    reinforcement learning happens in w, so that nothing but sampling is asked of the base. w = noise_bound *
    tanh(actor) + std * normal. Its log-probability is that of all H rows: each of them enters the network that decides
    on the executed ones. Learned with PPO where the paper uses an off-policy critic.
    """

    must_match = ("activation", "prediction", "denoise_steps")
    wraps = "base."

    def __init__(self, spec: EnvSpec, config: DSRLConfig) -> None:
        super().__init__(spec, config)
        self.base = FlowPolicy(spec, config).requires_grad_(False)
        self.scored_actions = config.horizon
        self.noise_bound, self.log_std_min = config.noise_bound, log(config.noise_std_min)
        chunk = config.horizon * spec.action_dim
        self.actor = mlp(spec.state_dim, config.noise_hidden, chunk, config.activation, gain=0.01)
        self.log_std = nn.Parameter(torch.full((config.horizon, spec.action_dim), log(config.noise_std)))

    @property
    def std(self) -> Tensor:
        return self.log_std.clamp_min(self.log_std_min).exp()

    def mean(self, state: Tensor) -> Tensor:
        raw: Tensor = self.actor(state)
        return self.noise_bound * torch.tanh(raw).view(-1, self.horizon, self.spec.action_dim)

    def decode(self, obs: Obs, drawn: Tensor) -> Tensor:
        return self.base.integrate_ode(obs, drawn)[:, -1]
