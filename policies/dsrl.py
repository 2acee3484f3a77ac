"""Steering of a frozen flow policy by its initial noise."""

import torch
from torch import Tensor

from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies.config import DSRLConfig
from embodied.policies.flow.policy import FlowPolicy
from embodied.policies.gaussian import GaussianChunk
from embodied.policies.networks import BoundedStd, mlp


class DSRLPolicy(GaussianChunk):
    """A Gaussian over the initial noise w [H, A] of a flow policy, ``base``, whose weights never change.

    Diffusion steering (DSRL, Wagenmaker et al. 2025): the base maps (state, w) to a chunk, here by its ODE.
    Reinforcement learning acts on w, with w = noise_bound * tanh(actor) + std * normal, and only samples from the base.
    The log-probability of a decision is that of all H rows of w, because every row is an input of the network that
    gives the executed actions. PPO trains the actor; the paper uses an off-policy critic.
    """

    recordable = True
    must_match = ("activation", "prediction", "denoise_steps")
    must_match_exploring = ("noise_bound", "noise_std_min", "noise_std_max")
    wraps = "base."
    wrapped = FlowPolicy

    def __init__(self, spec: EnvSpec, config: DSRLConfig) -> None:
        super().__init__(spec, config)
        self.base = FlowPolicy(spec, config).requires_grad_(False)
        self.scored_actions = config.horizon
        self.noise_bound = config.noise_bound
        chunk = config.horizon * spec.action_dim
        self.actor = mlp(spec.state_dim, config.noise_hidden, chunk, config.activation, gain=0.01)
        stds = (config.noise_std_min, config.noise_std_max, config.noise_std)
        self.bounded_std = BoundedStd((config.horizon, spec.action_dim), *stds)

    def mean(self, inputs: Tensor) -> Tensor:
        """Return the mean of the noise [N, H, A] for a normalised state [N, S]."""
        raw: Tensor = self.actor(inputs)
        return self.noise_bound * torch.tanh(raw).view(-1, self.horizon, self.spec.action_dim)

    def decode(self, obs: Obs, drawn: Tensor) -> Tensor:
        """Return the end of the base's ODE from the initial noise ``drawn``, [N, H, A] both."""
        return self.base.integrate_ode(obs, drawn)[:, -1]
