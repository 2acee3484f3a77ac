"""A policy that draws action chunks by denoising, trainable by RL from scratch and by imitation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import log

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embodied.core.types import EnvSpec, Evaluation, Obs, PolicySample
from policies.base import ActorCritic, ActorCriticConfig, check, check_hidden, check_name, is_positive_int
from policies.flow.network import Code, Denoiser, NoiseNetwork, time_features
from policies.flow.sampler import Transition, integrate, sample_chain, sample_one_step
from policies.flow.step import flow_noise, flow_sde, interpolate, sde_sigma, time_grid, velocity_to
from policies.likelihood import gaussian_entropy, gaussian_log_prob, sum_by_action, sum_executed

PREDICTIONS = ("action", "velocity")
EXPLORATIONS = ("flow_noise", "flow_sde")
STOCHASTIC_STEPS = ("all", "one")
MIN_LOSS_TIME = 0.05  # lower bound of the 1/t weight in the imitation loss, as in Li & He (2025)


@dataclass(frozen=True)
class FlowConfig(ActorCriticConfig):
    """Options of FlowPolicy; standard deviations are in action units ([-1, 1])."""

    denoise_steps: int = 4
    head_hidden: tuple[int, ...] = (128,)
    prediction: str = "action"
    exploration: str = "flow_noise"
    stochastic_steps: str = "all"
    sde_noise: float = 0.5
    sigma_min: float = 0.05
    sigma_max: float = 1.0
    sigma_init: float = 0.25
    noise_final: float = 1.0
    noise_anneal: int = 0
    checkpoint_steps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(is_positive_int(self.denoise_steps), "denoise_steps", self.denoise_steps, "an integer of at least 1")
        check_hidden("head_hidden", self.head_hidden)
        check_name("prediction", self.prediction, PREDICTIONS)
        check_name("exploration", self.exploration, EXPLORATIONS)
        check_name("stochastic_steps", self.stochastic_steps, STOCHASTIC_STEPS)
        check(self.sde_noise > 0.0, "sde_noise", self.sde_noise, "above 0")
        ordered = 0.0 < self.sigma_min < self.sigma_max
        check(ordered, "sigma_min", self.sigma_min, f"above 0, below sigma_max ({self.sigma_max})")
        shrunk = self.noise_anneal == 0 or self.sigma_max * self.noise_final > self.sigma_min
        shrunk = shrunk and 0.0 < self.noise_final <= 1.0
        check(shrunk, "noise_final", self.noise_final, "above 0, at most 1, with sigma_max times it above sigma_min")
        check(self.noise_anneal >= 0, "noise_anneal", self.noise_anneal, "an integer of at least 0")
        inside = self.sigma_min < self.sigma_init < self.sigma_max
        check(inside, "sigma_init", self.sigma_init, f"between {self.sigma_min} and {self.sigma_max}, both excluded")


class FlowPolicy(ActorCritic):
    """Flow matching over chunks [H, A], explored by stochastic denoise steps, each of which is a Gaussian.

    Parametrisation. By default the network predicts the clean action f(x, t, state) and the velocity is ``(x - f)/t``
    (x-prediction: Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise"). The last Euler step then
    lands on f exactly, so the initial noise is contracted away and an untrained policy is a Gaussian around f ~ 0 with
    the last step's sigma: RL from scratch starts as Gaussian PPO does. ``prediction: velocity`` is as in pi0.

    Exploration. ``flow_noise`` learns every step's standard deviation, ``flow_sde`` has the SDE that shares the ODE's
    marginals (policies/flow/step.py). With ``stochastic_steps: one`` a single step of each decision, drawn uniformly,
    is stochastic and the others follow the ODE: mixed ODE-SDE.

    Likelihood. The chain x_0 (noise), x_1, ..., x_K (action) is a Markov chain of diagonal Gaussians, and the
    log-probability of a decision is the exact sum of its K transitions' log-densities. The density of x_0 has no
    parameter and cancels in every ratio. With one stochastic step it is that transition's log-density; the chain
    holds its ends and its index, whose probability 1/K cancels too. With E < H, actions beyond E are never executed
    and their coordinates do not count, in any transition: the result is the density of the executed coordinates, step
    by step, given all coordinates of the step before. As the others enter the network's input, this leaves out the
    credit for what their noise did to the executed ones; with E = H (the default) nothing is left out.

    Annealing. After every update the upper end of the noise (sigma_max, sde_noise) shrinks by a constant factor, to
    noise_final of itself in noise_anneal updates. How far it has shrunk is part of the weights.

    Memory. With ``checkpoint_steps`` the gradient keeps only what enters each of the K steps and computes the rest
    again: memory does not grow with K times the width of the denoiser.

    Entropy is the sum of the stochastic transitions' Gaussian entropies along the given chain, over the same
    coordinates.
    """

    meaning = ("activation", "prediction")
    schedules = ("log_shrink",)
    untrained = ("critic.", "noise_network.")

    log_shrink: Tensor
    grid: Tensor
    grid_features: Tensor
    grid_sigma: Tensor

    def __init__(self, spec: EnvSpec, config: FlowConfig) -> None:
        super().__init__(spec, config)
        self.denoise_steps = config.denoise_steps
        self.predicts_velocity = config.prediction == "velocity"
        self.one_stochastic_step = config.stochastic_steps == "one"
        chunk = config.horizon * spec.action_dim
        self.denoiser = Denoiser(spec.state_dim, chunk, config.actor_hidden, config.head_hidden, config.activation)
        self.noise_network: NoiseNetwork | None = None
        if config.exploration == "flow_noise":
            sigmas = (config.sigma_min, config.sigma_max, config.sigma_init)
            self.noise_network = NoiseNetwork(config.head_hidden[-1], chunk, *sigmas)
        self.noise_anneal, self.noise_final = config.noise_anneal, config.noise_final
        self.register_buffer("log_shrink", torch.zeros(()))
        self.checkpoint_steps = config.checkpoint_steps
        grid = time_grid(config.denoise_steps)
        self.register_buffer("grid", grid.float(), persistent=False)
        self.register_buffer("grid_features", time_features(grid).float(), persistent=False)
        sigma = sde_sigma(config.denoise_steps, config.sde_noise)
        self.register_buffer("grid_sigma", sigma.float(), persistent=False)

    def velocity(self, code: Code, x: Tensor, t: Tensor, time: Tensor) -> Tensor:
        """Velocity at x [..., H, A] and t [...], whose features are ``time``; code is the encoded state."""
        features = self.denoiser.features(code, x.flatten(-2), time)
        return self.to_velocity(self.denoiser.predict(code, features), x, t)

    def transition(self, code: Code, x: Tensor, k: int | slice | Tensor) -> Transition:
        """Denoise steps ``k`` (which index the grid; the result broadcasts with [...]) at x [..., H, A].

        Sampler and likelihood both come here: there is no other place that knows what a step does.
        """
        t, time, delta = self.grid[k], self.grid_features[k], 1.0 / self.denoise_steps
        features = self.denoiser.features(code, x.flatten(-2), time)
        if self.noise_network is not None:
            prediction, sigma = self.denoiser.predict_jointly(code, features, self.noise_network, self.log_shrink)
            velocity = self.to_velocity(prediction, x, t)
            return Transition(velocity, *flow_noise(x, velocity, sigma.view_as(x), delta))
        velocity = self.to_velocity(self.denoiser.predict(code, features), x, t)
        sigma = (self.grid_sigma[k] * self.log_shrink.exp())[..., None, None]
        return Transition(velocity, *flow_sde(x, velocity, t[..., None, None], sigma, delta))

    def to_velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The denoiser's prediction [..., H*A] at x [..., H, A], t [...] as a velocity [..., H, A]."""
        prediction = prediction.reshape(x.shape)
        return prediction if self.predicts_velocity else velocity_to(prediction, x, t[..., None, None])

    def sample_noise(self, num: int, generator: torch.Generator) -> Tensor:
        """Standard normals for ``num`` decisions: the initial noise, then that of every step, [num, K+1, H, A].

        With one stochastic step [num, 3, H, A]: the initial noise, that of the step, and one that picks the step.
        """
        planes = 3 if self.one_stochastic_step else self.denoise_steps + 1
        return torch.randn(num, planes, self.horizon, self.spec.action_dim, generator=generator)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor | None) -> PolicySample:
        """Draw a chunk for each row of obs.

        noise=None follows the ODE from zero noise, without the noise network; a point mass has no density, so its
        log-probability is given as 0.
        """
        state = self.normalized_state(obs)
        value = self.state_value(state, obs)
        code = self.denoiser.encode(state)
        log_prob = torch.zeros_like(value)
        if noise is None:
            chain = self._integrate(code, state.new_zeros(state.shape[0], self.horizon, self.spec.action_dim))
            action = chain[:, -1]
            if self.one_stochastic_step:
                last = torch.full(value.shape, self.denoise_steps - 1, device=value.device)
                chain = _one_step_chain(chain[:, -2], action, last)
        elif self.one_stochastic_step:
            index = self.pick_step(noise[:, 2, 0, 0]).to(state.device)
            start, step_noise = noise[:, 0].to(state), noise[:, 1].to(state)
            one = sample_one_step(partial(self.transition, code), start, step_noise, index, self.denoise_steps)
            action, chain = one.action, _one_step_chain(one.before, one.after, index)
            log_prob = sum_executed(gaussian_log_prob(one.after, one.mean, one.std).unsqueeze(1), self.execute)
        else:
            chain, mean, std = sample_chain(partial(self.transition, code), noise.to(state))
            action = chain[:, -1]
            log_prob = sum_executed(gaussian_log_prob(chain[:, 1:], mean, std), self.execute)
        version = torch.full(value.shape, -1, dtype=torch.int64, device=value.device)
        return PolicySample(action, log_prob, value, chain, version)

    @torch.no_grad()
    def follow(self, obs: Obs, start: Tensor) -> Tensor:
        """The ODE from ``start`` [N, H, A] at t = 1, its states [N, K+1, H, A]; the last is the action."""
        return self._integrate(self.denoiser.encode(self.normalized_state(obs)), start)

    def _integrate(self, code: Code, start: Tensor) -> Tensor:
        return integrate(
            lambda x, k: self.velocity(code, x, self.grid[k], self.grid_features[k]), start, self.denoise_steps
        )

    def pick_step(self, normal_N: Tensor) -> Tensor:
        """A step 0..K-1, uniformly, from a standard normal: int64 [N]."""
        uniform_N: Tensor = torch.special.ndtr(normal_N)
        return (uniform_N * self.denoise_steps).long().clamp(max=self.denoise_steps - 1)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Log-probability, entropy and value of recorded chains [B, K+1, H, A], all K transitions in one batch.

        With one stochastic step the chain is [B, 3, H, A], and that step is all that is computed.
        """
        state = self.normalized_state(obs)
        code = self.denoiser.encode(state)
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
        return Evaluation.of(log_prob_BE, entropy_B, self.state_value(state, obs), count)

    def _score(self, code: Code, x: Tensor, after: Tensor, k: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Log-density [B, E] and entropy [B] of steps ``k`` from x to after, both [B, steps, H, A]."""
        _, mean, std = self.transition(code.unsqueeze(1), x, k)
        log_prob_BE = sum_by_action(gaussian_log_prob(after, mean, std), self.execute)
        return log_prob_BE, sum_executed(gaussian_entropy(std), self.execute)

    def update_normalizer(self, obs: Obs) -> None:
        """An update has ended: fold its observations into the statistics, and anneal the noise."""
        super().update_normalizer(obs)
        if self.noise_anneal:
            step = log(self.noise_final) / self.noise_anneal
            self.log_shrink.copy_((self.log_shrink + step).clamp_min(log(self.noise_final)))

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, generator: torch.Generator) -> Tensor:
        """Flow-matching loss of demonstrated chunks, a scalar: mean squared error of the velocity ``noise - action``.

        Times are drawn from Beta(1.5, 1) * 0.999 + 0.001 as for pi0 (by its inverse distribution, u^(2/3)). With the
        action predicted, the error of the velocity is that of the action over t; t is bounded below by MIN_LOSS_TIME
        there, which only takes weight from the last, easiest times.
        """
        noise = torch.randn(action_NHA.shape, generator=generator).to(action_NHA)
        t = (torch.rand(action_NHA.shape[0], generator=generator) ** (2.0 / 3.0) * 0.999 + 0.001).to(action_NHA)
        t_N11 = t[:, None, None]
        x = interpolate(action_NHA, noise, t_N11)
        code = self.denoiser.encode(self.normalized_state(obs))
        velocity = self.velocity(code, x, t, time_features(t))
        error = velocity - (noise - action_NHA)
        if not self.predicts_velocity:
            error = error * (t_N11 / t_N11.clamp_min(MIN_LOSS_TIME))
        return error.square().mean()


def _one_step_chain(before: Tensor, after: Tensor, index_N: Tensor) -> Tensor:
    """Both ends of the stochastic step [N, H, A] and its index, a plane of its own, [N, 3, H, A]."""
    plane = index_N[:, None, None].to(before).expand_as(before)
    return torch.stack((before, after, plane), 1)
