"""Base of all flow policies: drawing chains of stochastic denoise steps, and computing their likelihood.

obs ─► encode ─► encoding ─► K times: network(encoding, x, k) ─► mean, std ─► x of the next step   (act)
                     └─────► all recorded steps at once ───────► mean, std ─► log-density, entropy (evaluate)
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embodied.core.spec import EnvSpec
from embodied.core.types import Evaluation, Obs, PolicySample
from embodied.policies.base import ActorCritic
from embodied.policies.config import ChainConfig
from embodied.policies.flow.prefix import fixed_rows, free, hold, prefix_features, put_prefix
from embodied.policies.flow.sampler import Transition, integrate, sample_chain, sample_one_step
from embodied.policies.flow.step import flow_noise, flow_sde, sde_sigma, time_grid
from embodied.policies.likelihood import gaussian_entropy, gaussian_log_prob, sum_by_action, sum_executed
from embodied.policies.networks import NoiseNetwork


class FlowChains(ActorCritic):
    """Flow matching over chunks [H, W], explored by Gaussian denoise steps. A subclass provides the network.

    W is the width of a denoised row: the A dimensions of an action, then padding if the network was built for more.

    Exploration. ``flow_noise`` learns the standard deviation of every step, ``flow_sde`` takes steps of the SDE with
    the ODE's marginals (policies/flow/step.py). With ``stochastic_steps: one`` a single step of each decision, drawn
    uniformly, is stochastic and the others follow the ODE: mixed ODE-SDE. With ``last`` it is the last step. The noise
    of the last step reaches the action unchanged, whereas a trained flow removes most of the noise of earlier steps.

    Likelihood. The chain x_0 (noise), x_1, ..., x_K (action) is a Markov chain of diagonal Gaussians. The
    log-probability of a decision is the exact sum of the log-densities of its K transitions. The density of x_0 has no
    parameter and cancels in every ratio. With one stochastic step, only this transition counts; the chain then holds
    its two ends and its index, whose probability (1/K or 1) cancels too.

    Coordinates. Padding and, with E + D < H, the actions beyond E + D are never executed, and their densities are left
    out. The result is the density of the other coordinates at each step, given all coordinates of the step before.
    Those left out are network input too, so their noise affects the others; this density gives no credit for that.
    With E + D = H and W = A it is complete.

    Delay. With D = ``max_delay`` > 0 the first d rows of a chunk are the prefix of the observation, in every state of
    the chain. They are no choice: their densities are left out, and no gradient flows through them.

    Entropy. The sum of the Gaussian entropies of the stochastic transitions along the given chain, over the same
    coordinates.

    Memory. With ``checkpoint_steps`` the gradient stores only the inputs of the K steps and recomputes everything else.
    """

    grid: Tensor
    """Flow times at which the steps begin, [K]."""
    grid_sigma: Tensor
    """Diffusion of flow_sde at these times, [K]."""

    def __init__(
        self, spec: EnvSpec, config: ChainConfig, noise_shape: tuple[int, int], width: int, critic_inputs: int
    ) -> None:
        """Build all but the network.

        noise_shape: numbers of inputs and outputs of the noise network. width: W. critic_inputs: size of the critic's
        input in ``encoded_value``, without the privileged observation.
        """
        prefix_size = config.max_delay * (spec.action_dim + 1)
        super().__init__(spec, config, critic_inputs + prefix_size)
        self.max_delay, self.prefix_size = config.max_delay, prefix_size
        self.scored_rows = config.execute + config.max_delay
        self.width = width
        self.denoise_steps = config.denoise_steps
        self.one_stochastic_step = config.stochastic_steps != "all"
        self.first_stochastic_step = config.denoise_steps - 1 if config.stochastic_steps == "last" else 0
        self.scored_share = 1 / config.denoise_steps if config.stochastic_steps == "one" else 1.0
        self.noise_network: NoiseNetwork | None = None
        if config.exploration == "flow_noise":
            sigmas = (config.sigma_min, config.sigma_max, config.sigma_init)
            self.noise_network = NoiseNetwork(*noise_shape, *sigmas)
        self.checkpoint_steps = config.checkpoint_steps
        self.plan_noise_shape = (config.horizon, width)  # the initial noise
        # the initial noise, then that of every step; or of the one stochastic step, and noise that picks this step
        self.noise_shape = (3 if self.one_stochastic_step else config.denoise_steps + 1, config.horizon, width)
        self.register_buffer("grid", time_grid(config.denoise_steps).float(), persistent=False)
        sigma = sde_sigma(config.denoise_steps, config.sde_noise)
        self.register_buffer("grid_sigma", sigma.float(), persistent=False)

    # -- methods of a subclass -----------------------------------------------------------------------------------------

    def encode(self, obs: Obs) -> Any:
        """Encode N observations: compute all that does not depend on x, once for all denoise steps.

        With ``max_delay`` the encoding has an attribute ``fixed``, which ``fixed_rows`` gives.
        """
        raise NotImplementedError

    def expand_steps(self, encoding: Any) -> Any:
        """Return the encoding for a batch x [N, steps, H, W]."""
        raise NotImplementedError

    def encoded_value(self, encoding: Any, obs: Obs) -> Tensor:
        """Return the critic's value of encoded observations, [N]."""
        raise NotImplementedError

    def velocity(self, encoding: Any, x: Tensor, k: int | slice | Tensor) -> Tensor:
        """Return the velocity [..., H, W] at x [..., H, W] at the times ``grid[k]``."""
        raise NotImplementedError

    def noisy_velocity(self, encoding: Any, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return ``velocity`` and the standard deviations of the noise network, [..., H, W] each."""
        raise NotImplementedError

    # -- the policy ----------------------------------------------------------------------------------------------------

    def transition(self, encoding: Any, x: Tensor, k: int | slice | Tensor) -> Transition:
        """Return the transitions of denoise steps ``k`` at x [..., H, W]; ``grid[k]`` must broadcast with [...].

        Sampler and likelihood both use this method, so that they agree on every step.
        """
        delta = 1.0 / self.denoise_steps
        if self.noise_network is not None:
            velocity, sigma = self.noisy_velocity(encoding, x, k)
            step = Transition(velocity, *flow_noise(x, velocity, sigma, delta))
        else:
            velocity = self.velocity(encoding, x, k)
            sigma = self.grid_sigma[k][..., None, None]
            step = Transition(velocity, *flow_sde(x, velocity, self.grid[k][..., None, None], sigma, delta))
        return hold(step, x, self._fixed(encoding))

    def fixed_rows(self, obs: Obs) -> Tensor | None:
        """Return which rows of the chunk the prefix gives, bool [N, H, 1]; None without ``max_delay``."""
        return fixed_rows(obs, self.horizon) if self.max_delay else None

    def with_prefix(self, features: Tensor, obs: Obs) -> Tensor:
        """Append prefix and delay to features [N, F] of observations, if there is a ``max_delay``."""
        return torch.cat((features, prefix_features(obs, features)), -1) if self.max_delay else features

    def value(self, obs: Obs) -> Tensor:
        return self.encoded_value(self.encode(obs), obs)

    @torch.no_grad()
    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """Return the end of the ODE from the initial noise [N, H, W] (None: zero), [N, H, A]; no noise network runs."""
        state = obs["state"]
        start = state.new_zeros(len(state), self.horizon, self.width) if noise is None else noise.to(state)
        return self.integrate_ode(obs, start)[:, -1, :, : self.spec.action_dim]

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row of obs with noise [N, *noise_shape].

        With one stochastic step the chain is both ends of this step and its index, which fills a plane, [N, 3, H, W].
        """
        encoding = self.encode(obs)
        value = self.encoded_value(encoding, obs)
        if self.one_stochastic_step:
            index = self.pick_step(noise[:, 2, 0, 0]).to(value.device)
            start, step_noise = put_prefix(noise[:, :2].to(value), obs, self._fixed(encoding)).unbind(1)
            one = sample_one_step(partial(self.transition, encoding), start, step_noise, index, self.denoise_steps)
            plane = index[:, None, None].to(start).expand_as(start)
            action, chain = one.action, torch.stack((one.before, one.after, plane), 1)
            parts = (part.unsqueeze(1) for part in (one.after, one.mean, one.std))
            log_prob = self._density(encoding, *parts).sum(-1)
        else:
            drawn = put_prefix(noise.to(value), obs, self._fixed(encoding))
            chain, mean, std = sample_chain(partial(self.transition, encoding), drawn)
            action = chain[:, -1]
            log_prob = self._density(encoding, chain[:, 1:], mean, std).sum(-1)
        return PolicySample(action[..., : self.spec.action_dim], log_prob, value, chain)

    @torch.no_grad()
    def integrate_ode(self, obs: Obs, start: Tensor) -> Tensor:
        """Follow the ODE from ``start`` [N, H, W] at t = 1; return its states [N, K+1, H, W], the action last."""
        encoding = self.encode(obs)
        fixed = self._fixed(encoding)
        start = put_prefix(start.unsqueeze(1), obs, fixed).squeeze(1)
        return integrate(lambda x, k: free(self.velocity(encoding, x, k), fixed), start, self.denoise_steps)

    def pick_step(self, normal_N: Tensor) -> Tensor:
        """Pick the stochastic step of N decisions, uniformly, from standard normals [N]; return int64 [N]."""
        uniform_N: Tensor = torch.special.ndtr(normal_N)
        first, last = self.first_stochastic_step, self.denoise_steps - 1
        return (first + uniform_N * (last + 1 - first)).long().clamp(max=last)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Return log-probability, entropy and value of recorded chains [B, K+1, H, W].

        All K transitions are one batch. With one stochastic step, chains are [B, 3, H, W] and only it is computed.
        """
        encoding = self.encode(obs)
        if self.one_stochastic_step:
            x, after, index = chain[:, :1], chain[:, 1:2], chain[:, 2, :1, 0].long()
            log_prob_BE, entropy_B, distribution = self._score(encoding, x, after, index)
        elif self.checkpoint_steps:
            steps = [
                checkpoint(self._score, encoding, chain[:, k : k + 1], chain[:, k + 1 : k + 2], slice(k, k + 1),
                           use_reentrant=False, preserve_rng_state=False)
                for k in range(self.denoise_steps)
            ]  # fmt: skip
            shares, entropies, parts = zip(*steps, strict=True)
            log_prob_BE, entropy_B = torch.stack(shares).sum(0), torch.stack(entropies).sum(0)
            distribution = torch.cat(parts, 2)
        else:
            log_prob_BE, entropy_B, distribution = self._score(encoding, chain[:, :-1], chain[:, 1:], slice(None))
        num_free: Tensor | int = self.scored_rows - obs["delay"].to(log_prob_BE) if self.max_delay else self.scored_rows
        terms = distribution.shape[2] * distribution.shape[-1] * num_free
        value_B = self.encoded_value(encoding, obs)
        return Evaluation.of(log_prob_BE, entropy_B, value_B, distribution, terms, self.scored_share)

    def _score(self, encoding: Any, x: Tensor, after: Tensor, k: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score steps ``k`` from x to after, both [B, steps, H, W].

        Return the log-density [B, C], the entropy [B] and the distribution [B, 2, steps, C, A] of the first C actions
        (``scored_rows``).
        """
        _, mean, std = self.transition(self.expand_steps(encoding), x, k)
        entropy = free(gaussian_entropy(std[..., : self.spec.action_dim]), self._fixed(encoding))
        distribution = torch.stack((mean, std), 1)[..., : self.scored_rows, : self.spec.action_dim]
        return self._density(encoding, after, mean, std), sum_executed(entropy, self.scored_rows), distribution

    def _density(self, encoding: Any, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return the log-density of transitions to x [B, steps, H, W], the share of each scored action, [B, C]."""
        real = slice(self.spec.action_dim)
        per_element = gaussian_log_prob(x[..., real], mean[..., real], std[..., real])
        return sum_by_action(free(per_element, self._fixed(encoding)), self.scored_rows)

    def _fixed(self, encoding: Any) -> Tensor | None:
        """Return the rows that the prefix gives; None without ``max_delay``."""
        return encoding.fixed if self.max_delay else None

    @staticmethod
    def draw_path(action_NHW: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw noise [N, H, W] and times [N] of a flow-matching loss, on the device of the actions.

        Times follow Beta(1.5, 1) * 0.999 + 0.001 as in π0, by its inverse distribution function u^(2/3).
        """
        noise = torch.randn(action_NHW.shape, generator=generator).to(action_NHW)
        uniform_N = torch.rand(action_NHW.shape[0], generator=generator)
        return noise, (uniform_N ** (2.0 / 3.0) * 0.999 + 0.001).to(action_NHW)
