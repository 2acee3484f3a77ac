"""Steering of a frozen flow policy by its initial noise."""

import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.options import Positive, Widths, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies.flow.policy import FlowConfig, FlowPolicy
from embodied.policies.gaussian import GaussianChunk
from embodied.policies.networks import BoundedStd, mlp


@config_dataclass
class DSRLConfig(FlowConfig):
    """Options of DSRLPolicy: those of the actor that chooses the noise, and those of the frozen flow.

    The flow's options must be the ones that it was trained with; those of its exploration have no effect.
    """

    noise_hidden: Widths = (128, 128)
    """Widths of the hidden layers of the actor."""
    noise_bound: Positive = 2.0
    """Largest absolute mean of the noise, which was a standard normal in imitation."""
    noise_std: Positive = 0.5
    """Initial standard deviation of the noise around its mean."""
    noise_std_min: Positive = 0.1
    """Lower bound of the standard deviation of the noise."""
    noise_std_max: Positive = 2.0
    """Upper bound of the standard deviation of the noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_delay:
            raise UserError(f"max_delay: got {self.max_delay}, allowed: 0, as dsrl steers policies without delays only")
        if not self.noise_std_min < self.noise_std < self.noise_std_max:
            between = f"above noise_std_min={self.noise_std_min} and below noise_std_max={self.noise_std_max}"
            raise UserError(f"noise_std: got {self.noise_std}, allowed: {between}")


class DSRLPolicy(GaussianChunk):
    """A Gaussian over the initial noise w [H, A] of a flow policy, ``base``, whose weights never change.

    Diffusion steering (DSRL, Wagenmaker et al. 2025): the base maps (state, w) to a chunk, here by its ODE.
    Reinforcement learning acts on w, with w = noise_bound * tanh(actor) + std * normal, and only samples from the base.
    The log-probability of a decision is that of all H rows of w, because every row is an input of the network that
    gives the executed actions. PPO trains the actor; the paper uses an off-policy critic.
    """

    must_match = ("activation", "prediction", "denoise_steps")
    wraps = "base."

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
