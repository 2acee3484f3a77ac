"""What all flow policies share: how chains of stochastic denoise steps are drawn, and how likely they are.

obs ─► encode ─► code ─► K times: network(code, x, k) ─► mean, std ─► x of the next step      (act)
                   └──► all recorded steps at once ────► mean, std ─► log-density, entropy    (evaluate)
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embodied.core.errors import UserError
from embodied.core.options import Count, Positive, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Evaluation, Obs, PolicySample
from policies.base import ActorCritic, ActorCriticConfig
from policies.flow.network import NoiseNetwork
from policies.flow.sampler import Transition, integrate, sample_chain, sample_one_step
from policies.flow.step import flow_noise, flow_sde, sde_sigma, time_grid
from policies.likelihood import gaussian_entropy, gaussian_log_prob, sum_by_action, sum_executed


@config_dataclass
class ChainConfig(ActorCriticConfig):
    """Options of FlowChains; standard deviations are in action units ([-1, 1])."""

    denoise_steps: Count = 4
    """K, steps from noise to action."""
    exploration: Literal["flow_noise", "flow_sde"] = "flow_noise"
    """flow_noise: steps with a learned standard deviation. flow_sde: the SDE with the ODE's marginals."""
    stochastic_steps: Literal["all", "one", "last"] = "all"
    """all: every denoise step. one: a random one for each decision, the others follow the ODE. last: always the last
    one, which explores less with every further denoise step (docs/flow_rl.md)."""
    sde_noise: Positive = 0.5
    """a of flow_sde, whose diffusion is a * sqrt(t / (1 - t))."""
    sigma_min: Positive = 0.05
    """Lower bound of the learned standard deviation of a denoise step."""
    sigma_max: Positive = 1.0
    """Upper bound of it."""
    sigma_init: Positive = 0.25
    """Its initial value."""
    checkpoint_steps: bool = False
    """Save memory: compute each denoise step again for its gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_min >= self.sigma_max:
            raise UserError(f"sigma_min: got {self.sigma_min}, allowed: below sigma_max={self.sigma_max}")
        if not self.sigma_min < self.sigma_init < self.sigma_max:
            between = f"above sigma_min={self.sigma_min} and below sigma_max={self.sigma_max}"
            raise UserError(f"sigma_init: got {self.sigma_init}, allowed: {between}")


class FlowChains(ActorCritic):
    """Flow matching over chunks [H, W], explored by stochastic denoise steps, each of which is a Gaussian. A subclass
    brings the network. W is the width of what is denoised: the A dimensions of an action, then padding if the network
    was made for more.

    Exploration. ``flow_noise`` learns every step's standard deviation, ``flow_sde`` has the SDE that shares the ODE's
    marginals (policies/flow/step.py). With ``stochastic_steps: one`` a single step of each decision, drawn uniformly,
    is stochastic and the others follow the ODE: mixed ODE-SDE. With ``last`` it is always the last one, whose noise
    reaches the action as it was drawn: a trained flow takes away most of what earlier steps add.

    Likelihood. The chain x_0 (noise), x_1, ..., x_K (action) is a Markov chain of diagonal Gaussians, and the
    log-probability of a decision is the exact sum of its K transitions' log-densities. The density of x_0 has no
    parameter and cancels in every ratio. With one stochastic step it is that transition's log-density; the chain
    holds its ends and its index, whose probability (1/K, or 1) cancels too. With E < H, actions beyond E are never
    executed and their coordinates do not count, in any transition, nor does padding: the result is the density of the
    executed coordinates, step by step, given all coordinates of the step before. As the others enter the network's
    input, this leaves out the credit for what their noise did to the executed ones; with E = H and W = A nothing is
    left out.

    Memory. With ``checkpoint_steps`` the gradient keeps only what enters each of the K steps and computes the rest
    again: memory does not grow with K times the width of the network.

    Entropy is the sum of the stochastic transitions' Gaussian entropies along the given chain, over the same
    coordinates.
    """

    grid: Tensor
    grid_sigma: Tensor

    def __init__(
        self, spec: EnvSpec, config: ChainConfig, noise_shape: tuple[int, int], width: int, critic_inputs: int
    ) -> None:
        """noise_shape: features that the noise network reads, and numbers that it gives for them. critic_inputs: size
        of what ``code_value`` gives the critic beside the privileged observation."""
        super().__init__(spec, config, critic_inputs)
        self.width = width
        self.denoise_steps = config.denoise_steps
        self.one_stochastic_step = config.stochastic_steps != "all"
        self.first_stochastic_step = config.denoise_steps - 1 if config.stochastic_steps == "last" else 0
        self.noise_network: NoiseNetwork | None = None
        if config.exploration == "flow_noise":
            sigmas = (config.sigma_min, config.sigma_max, config.sigma_init)
            self.noise_network = NoiseNetwork(*noise_shape, *sigmas)
        self.checkpoint_steps = config.checkpoint_steps
        self.register_buffer("grid", time_grid(config.denoise_steps).float(), persistent=False)
        sigma = sde_sigma(config.denoise_steps, config.sde_noise)
        self.register_buffer("grid_sigma", sigma.float(), persistent=False)

    # -- what a subclass brings ----------------------------------------------------------------------------------------

    def encode(self, obs: Obs) -> Any:
        """The code of N observations: what all denoise steps of their decisions share."""
        raise NotImplementedError

    def expand_steps(self, code: Any) -> Any:
        """The code for a batch x [N, steps, H, W]."""
        raise NotImplementedError

    def code_value(self, code: Any, obs: Obs) -> Tensor:
        """Critic's value, [N]."""
        raise NotImplementedError

    def velocity(self, code: Any, x: Tensor, k: int | slice | Tensor) -> Tensor:
        """Velocity at x [..., H, W] at the times of steps ``k``, which index the grid."""
        raise NotImplementedError

    def noisy_velocity(self, code: Any, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        """``velocity``, and the noise network's standard deviations, [..., H, W] each."""
        raise NotImplementedError

    # -- what follows from it ------------------------------------------------------------------------------------------

    def transition(self, code: Any, x: Tensor, k: int | slice | Tensor) -> Transition:
        """Denoise steps ``k`` (which index the grid; the result broadcasts with [...]) at x [..., H, W].

        Sampler and likelihood both come here: there is no other place that knows what a step does.
        """
        delta = 1.0 / self.denoise_steps
        if self.noise_network is not None:
            velocity, sigma = self.noisy_velocity(code, x, k)
            return Transition(velocity, *flow_noise(x, velocity, sigma, delta))
        velocity = self.velocity(code, x, k)
        sigma = self.grid_sigma[k][..., None, None]
        return Transition(velocity, *flow_sde(x, velocity, self.grid[k][..., None, None], sigma, delta))

    def value(self, obs: Obs) -> Tensor:
        return self.code_value(self.encode(obs), obs)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[K+1, H, W]: the initial noise, then that of every step.

        With one stochastic step [3, H, W]: the initial noise, that of the step, and one that picks the step.
        """
        return (3 if self.one_stochastic_step else self.denoise_steps + 1, self.horizon, self.width)

    @property
    def plan_noise_shape(self) -> tuple[int, ...]:
        return (self.horizon, self.width)

    @torch.no_grad()
    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """The end of the ODE from the initial noise [N, H, W] (None: zero), without the noise network, [N, H, A]."""
        state = obs["state"]
        start = state.new_zeros(len(state), self.horizon, self.width) if noise is None else noise.to(state)
        return self.integrate_ode(obs, start)[:, -1, :, : self.spec.action_dim]

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row of obs."""
        code = self.encode(obs)
        value = self.code_value(code, obs)
        if self.one_stochastic_step:
            index = self.pick_step(noise[:, 2, 0, 0]).to(value.device)
            start, step_noise = noise[:, 0].to(value), noise[:, 1].to(value)
            one = sample_one_step(partial(self.transition, code), start, step_noise, index, self.denoise_steps)
            action, chain = one.action, _one_step_chain(one.before, one.after, index)
            log_prob = self._density(one.after.unsqueeze(1), one.mean.unsqueeze(1), one.std.unsqueeze(1)).sum(-1)
        else:
            chain, mean, std = sample_chain(partial(self.transition, code), noise.to(value))
            action = chain[:, -1]
            log_prob = self._density(chain[:, 1:], mean, std).sum(-1)
        version = torch.full(value.shape, -1, dtype=torch.int64, device=value.device)
        return PolicySample(action[..., : self.spec.action_dim], log_prob, value, chain, version)

    @torch.no_grad()
    def integrate_ode(self, obs: Obs, start: Tensor) -> Tensor:
        """The ODE from ``start`` [N, H, W] at t = 1, its states [N, K+1, H, W]; the last is the action."""
        return self._integrate(self.encode(obs), start)

    def _integrate(self, code: Any, start: Tensor) -> Tensor:
        return integrate(lambda x, k: self.velocity(code, x, k), start, self.denoise_steps)

    def pick_step(self, normal_N: Tensor) -> Tensor:
        """The stochastic step of N decisions, uniformly of those it may be, from a standard normal: int64 [N]."""
        uniform_N: Tensor = torch.special.ndtr(normal_N)
        first, last = self.first_stochastic_step, self.denoise_steps - 1
        return (first + uniform_N * (last + 1 - first)).long().clamp(max=last)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Log-probability, entropy and value of recorded chains [B, K+1, H, W], all K transitions in one batch.

        With one stochastic step the chain is [B, 3, H, W], and that step is all that is computed.
        """
        code = self.encode(obs)
        if self.one_stochastic_step:
            x, after, index = chain[:, :1], chain[:, 1:2], chain[:, 2, :1, 0].long()
            log_prob_BE, entropy_B = self._score(code, x, after, index)
        elif self.checkpoint_steps:
            steps = [
                checkpoint(self._score, code, chain[:, k : k + 1], chain[:, k + 1 : k + 2], slice(k, k + 1),
                           use_reentrant=False)
                for k in range(self.denoise_steps)
            ]  # fmt: skip
            log_prob_BE, entropy_B = (torch.stack(part).sum(0) for part in zip(*steps, strict=True))
        else:
            log_prob_BE, entropy_B = self._score(code, chain[:, :-1], chain[:, 1:], slice(None))
        count = (1 if self.one_stochastic_step else self.denoise_steps) * self.execute * self.spec.action_dim
        return Evaluation.of(log_prob_BE, entropy_B, self.code_value(code, obs), count)

    def _score(self, code: Any, x: Tensor, after: Tensor, k: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Log-density [B, E] and entropy [B] of steps ``k`` from x to after, both [B, steps, H, W]."""
        _, mean, std = self.transition(self.expand_steps(code), x, k)
        entropy_B = sum_executed(gaussian_entropy(std[..., : self.spec.action_dim]), self.execute)
        return self._density(after, mean, std), entropy_B

    def _density(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Log-density of transitions to x [B, steps, H, W], the share of each executed action, [B, E]."""
        real = slice(self.spec.action_dim)
        return sum_by_action(gaussian_log_prob(x[..., real], mean[..., real], std[..., real]), self.execute)

    @staticmethod
    def draw_path(action_NHW: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise [N, H, W] and times [N] of a flow-matching loss, on the device of the actions.

        Times are drawn from Beta(1.5, 1) * 0.999 + 0.001 as for pi0, by its inverse distribution, u^(2/3).
        """
        noise = torch.randn(action_NHW.shape, generator=generator).to(action_NHW)
        uniform_N = torch.rand(action_NHW.shape[0], generator=generator)
        return noise, (uniform_N ** (2.0 / 3.0) * 0.999 + 0.001).to(action_NHW)


def _one_step_chain(before: Tensor, after: Tensor, index_N: Tensor) -> Tensor:
    """Both ends of the stochastic step [N, H, W] and its index, a plane of its own, [N, 3, H, W]."""
    plane = index_N[:, None, None].to(before).expand_as(before)
    return torch.stack((before, after, plane), 1)
