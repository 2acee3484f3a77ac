"""Steering a frozen flow policy by its initial noise."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn

from embodied.core.types import EnvSpec, Evaluation, Obs, PolicySample
from policies.base import ActorCritic, check, check_hidden
from policies.flow.policy import FlowConfig, FlowPolicy
from policies.likelihood import gaussian_entropy, gaussian_log_prob, sum_by_action, sum_executed
from policies.networks import mlp


@dataclass(frozen=True)
class DSRLConfig(FlowConfig):
    """Options of DSRLPolicy: those of the frozen flow, which must be its own, and of the actor on its noise."""

    noise_hidden: tuple[int, ...] = (128, 128)
    noise_bound: float = 2.0
    noise_std: float = 0.5
    noise_std_min: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hidden("noise_hidden", self.noise_hidden)
        check(self.noise_bound > 0.0, "noise_bound", self.noise_bound, "above 0")
        check(self.noise_std_min > 0.0, "noise_std_min", self.noise_std_min, "above 0")
        check(self.noise_std >= self.noise_std_min, "noise_std", self.noise_std, f"at least {self.noise_std_min}")


class DSRLPolicy(ActorCritic):
    """A Gaussian over the initial noise w [H, A] of a flow policy, ``base``, whose weights never change.

    Diffusion steering (DSRL, Wagenmaker et al. 2025): the base is a map from (state, w) to a chunk, here its ODE, and
    reinforcement learning happens in w, so that nothing but sampling is asked of the base. w = noise_bound *
    tanh(actor) + std * normal. The chain is w, [N, 1, H, A]; its log-probability is that of w, over all H actions:
    each of them enters the network that decides on the executed ones. Learned with PPO where the paper uses an
    off-policy critic.
    """

    meaning = ("activation", "prediction", "denoise_steps")
    wraps = "base."

    def __init__(self, spec: EnvSpec, config: DSRLConfig) -> None:
        super().__init__(spec, config)
        self.base = FlowPolicy(spec, config).requires_grad_(False)
        self.noise_bound, self.log_std_min = config.noise_bound, log(config.noise_std_min)
        chunk = config.horizon * spec.action_dim
        self.actor = mlp(spec.state_dim, config.noise_hidden, chunk, config.activation, gain=0.01)
        self.log_std = nn.Parameter(torch.full((config.horizon, spec.action_dim), log(config.noise_std)))

    @property
    def std(self) -> Tensor:
        """Standard deviation of w, [H, A]."""
        return self.log_std.clamp_min(self.log_std_min).exp()

    def mean(self, state: Tensor) -> Tensor:
        """Mean of w [N, H, A] at a normalised state [N, S]."""
        raw: Tensor = self.actor(state)
        return self.noise_bound * torch.tanh(raw).view(-1, self.horizon, self.spec.action_dim)

    def sample_noise(self, num: int, generator: torch.Generator) -> Tensor:
        """Standard normals for ``num`` decisions, [num, 1, H, A]."""
        return torch.randn(num, 1, self.horizon, self.spec.action_dim, generator=generator)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor | None) -> PolicySample:
        """Draw w for each row and follow the base's ODE from it; noise=None takes the mean of w, with log-prob 0."""
        state = self.normalized_state(obs)
        mean = self.mean(state)
        value = self.state_value(state, obs)
        if noise is None:
            start, log_prob = mean, torch.zeros_like(value)
        else:
            std = self.std
            start = mean + std * noise[:, 0].to(mean)
            log_prob = sum_executed(gaussian_log_prob(start, mean, std).unsqueeze(1), self.horizon)
        action = self.base.follow(obs, start)[:, -1]
        version = torch.full(value.shape, -1, dtype=torch.int64, device=value.device)
        return PolicySample(action, log_prob, value, start.unsqueeze(1), version)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Log-probability and entropy of w, and value; chain is [B, 1, H, A]. The base is not asked."""
        state = self.normalized_state(obs)
        mean, std = self.mean(state).unsqueeze(1), self.std
        log_prob_BH = sum_by_action(gaussian_log_prob(chain, mean, std), self.horizon)
        entropy_B = sum_executed(gaussian_entropy(std)[None, None], self.horizon).expand(len(chain))
        terms = self.horizon * self.spec.action_dim
        return Evaluation.of(log_prob_BH, entropy_B, self.state_value(state, obs), terms)
