"""A small Gaussian policy and fragments of it, for tests of algorithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from embodied.core.episodes import EpisodeStats
from embodied.core.policy import Policy
from embodied.core.types import Evaluation, Fragment, Obs, PolicySample

STATE, HORIZON, EXECUTE, ACTION = 3, 2, 2, 2


class TinyPolicy(Policy):
    """MLP mean of H x A, state-independent log standard deviation, a critic, and a running normaliser of the state."""

    horizon, execute = HORIZON, EXECUTE

    def __init__(self, seed: int = 0, hidden: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.actor = nn.Sequential(nn.Linear(STATE, hidden), nn.Tanh(), nn.Linear(hidden, HORIZON * ACTION))
            self.critic = nn.Sequential(nn.Linear(STATE, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.full((HORIZON * ACTION,), -0.5))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(STATE))
        self.register_buffer("square", torch.ones(STATE))

    def _features(self, obs: Obs) -> Tensor:
        return (obs["state"] - self.mean) / (self.square - self.mean**2).clamp(min=1e-4).sqrt()

    noise_shape = plan_noise_shape = (HORIZON * ACTION,)

    @torch.no_grad()
    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        mean = self.actor(self._features(obs))
        flat = mean if noise is None else mean + self.log_std.exp() * noise.to(mean.dtype)
        return flat.view(-1, HORIZON, ACTION)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        mean = self.actor(self._features(obs))
        flat = mean + self.log_std.exp() * noise.to(mean.dtype)
        chain = flat.view(-1, 1, HORIZON, ACTION)
        seen = self.evaluate(obs, chain)
        version = torch.full((len(mean),), -1)
        return PolicySample(chain[:, 0], seen.log_prob_B, seen.value_B, chain, version)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        features = self._features(obs)
        scaled = (chain.flatten(1) - self.actor(features)) * (-self.log_std).exp()
        constant = self.log_std + 0.5 * math.log(2 * math.pi)
        log_prob_BE = (-0.5 * scaled**2 - constant).view(-1, EXECUTE, ACTION).sum(-1)
        entropy_B = (constant + 0.5).sum().expand(len(features)).contiguous()
        mean = self.actor(features)
        distribution = torch.stack((mean, self.log_std.exp().expand_as(mean)), 1)
        return Evaluation.of(log_prob_BE, entropy_B, self.critic(features)[:, 0], distribution, EXECUTE * ACTION)

    def kl_divergence(self, p: Tensor, q: Tensor) -> Tensor:
        first, second = (Independent(Normal(*part.unbind(1), validate_args=False), 1) for part in (p, q))
        return kl_divergence(first, second)

    @torch.no_grad()
    def value(self, obs: Obs) -> Tensor:
        return self.critic(self._features(obs))[:, 0]

    @torch.no_grad()
    def update_normalizer(self, obs: Obs) -> None:
        state = obs["state"]
        self.count += len(state)
        weight = len(state) / self.count
        self.mean.lerp_(state.mean(0), weight)
        self.square.lerp_((state**2).mean(0), weight)


def make_fragment(
    policy: TinyPolicy, *, seed: int, version: int = 0, T: int = 5, N: int = 6, worker: int = 0
) -> Fragment:
    """Random observations, the policy's own decisions on them, and a reward that prefers small first actions."""
    generator = torch.Generator().manual_seed(seed)
    dtype = policy.log_std.dtype
    state = torch.randn(T, N, STATE, generator=generator).to(dtype) * 2 + 0.5
    flat = {"state": state.flatten(0, 1)}
    sample = policy.act(flat, torch.randn(T * N, *policy.noise_shape, generator=generator))
    reward = -(sample.action_NHA - flat["state"][:, None, :ACTION] * 0.3).square().sum(-1).view(T, N, EXECUTE)
    ended = torch.rand(T, N, generator=generator)
    terminated, truncated = ended < 0.1, ended > 0.9
    return Fragment(
        obs={"state": state},
        chain=sample.chain.view(T, N, 1, HORIZON, ACTION),
        log_prob_TN=sample.log_prob_N.view(T, N),
        value_TN=sample.value_N.view(T, N),
        reward_TNE=reward,
        num_steps_TN=torch.full((T, N), EXECUTE),
        terminated_TN=terminated,
        truncated_TN=truncated,
        final_value_TN=torch.randn(T, N, generator=generator).to(dtype) * truncated,
        bootstrap_value_N=torch.randn(N, generator=generator).to(dtype),
        version_TN=torch.full((T, N), version),
        episodes=EpisodeStats.concatenate([]),
        worker=worker,
    )
