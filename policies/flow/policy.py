"""A flow policy on the state vector, trainable by RL from scratch and by imitation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from embodied.core.options import Widths, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies.flow.chains import ChainConfig, FlowChains
from embodied.policies.flow.network import Denoiser, StateEncoding, time_features
from embodied.policies.flow.prefix import draw_prefix, learned_rows, noisy_chunk
from embodied.policies.flow.step import time_grid, velocity_to

MIN_LOSS_TIME = 0.05  # lower bound of t in the 1/t weight of the imitation loss, as in Li & He (2025)


@config_dataclass
class FlowConfig(ChainConfig):
    """Options of FlowPolicy."""

    actor_hidden: Widths = (128, 128)
    """Widths of the hidden layers of the state encoder, which runs once per decision."""
    head_hidden: Widths = (128,)
    """Widths of the hidden layers of the denoiser, which runs K times per decision."""
    prediction: Literal["action", "velocity"] = "action"
    """Output of the network: the clean action (for RL from scratch) or the velocity (as in π0)."""


class FlowPolicy(FlowChains):
    """A flow policy on the state vector; W = A.

    By default the network predicts the clean action f(x, t, state), and the velocity is ``(x - f) / t`` (x-prediction:
    Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise"). The last Euler step then ends exactly at
    f, so the initial noise does not reach the action. An untrained policy is a Gaussian around f ~ 0 with the last
    step's sigma, and RL from scratch starts like PPO with a Gaussian policy. ``prediction: velocity`` is as in π0.
    """

    must_match = ("activation", "prediction")
    not_imitated = ("critic.", "noise_network.")

    grid_features: Tensor
    """``time_features`` of the times in ``grid``, [K, TIME_FEATURES]."""

    def __init__(self, spec: EnvSpec, config: FlowConfig) -> None:
        chunk = config.horizon * spec.action_dim
        super().__init__(spec, config, (config.head_hidden[-1], chunk), spec.action_dim, spec.state_dim)
        self.predicts_velocity = config.prediction == "velocity"
        inputs = spec.state_dim + self.prefix_size
        self.denoiser = Denoiser(inputs, chunk, config.actor_hidden, config.head_hidden, config.activation)
        self.register_buffer("grid_features", time_features(time_grid(config.denoise_steps)).float(), persistent=False)

    def encode(self, obs: Obs) -> StateEncoding:
        """Encode the state of N observations, with prefix and delay."""
        encoding = self.denoiser.encode(self.with_prefix(self.normalized_state(obs), obs))
        return encoding._replace(fixed=self.fixed_rows(obs))

    def expand_steps(self, encoding: StateEncoding) -> StateEncoding:
        """Return the encoding for a batch x [N, steps, H, A]."""
        return encoding.unsqueeze(1)

    def encoded_value(self, encoding: StateEncoding, obs: Obs) -> Tensor:
        """Return the critic's value of encoded observations, [N]."""
        return self.state_value(encoding.state, obs)

    def value(self, obs: Obs) -> Tensor:
        """Return the critic's value of each row of obs, [N], without running the encoder."""
        return self.state_value(self.with_prefix(self.normalized_state(obs), obs), obs)

    def velocity(self, encoding: StateEncoding, x: Tensor, k: int | slice | Tensor) -> Tensor:
        """Return the velocity at x [..., H, A] at the times ``grid[k]``."""
        return self.velocity_at(encoding, x, self.grid[k], self.grid_features[k])

    def velocity_at(self, encoding: StateEncoding, x: Tensor, t: Tensor, time: Tensor) -> Tensor:
        """Return the velocity at x [..., H, A] at any times t [...] with features ``time`` [..., TIME_FEATURES]."""
        features = self.denoiser.features(encoding, x.flatten(-2), time)
        return self.to_velocity(self.denoiser.predict(encoding, features), x, t)

    def noisy_velocity(self, encoding: StateEncoding, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return ``velocity`` and the standard deviations of the noise network, [..., H, A] each."""
        assert self.noise_network is not None
        features = self.denoiser.features(encoding, x.flatten(-2), self.grid_features[k])
        prediction, sigma = self.denoiser.predict_jointly(encoding, features, self.noise_network)
        return self.to_velocity(prediction, x, self.grid[k]), sigma.view_as(x)

    def to_velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Convert the denoiser's prediction [..., H*A] at x [..., H, A], t [...] to a velocity [..., H, A]."""
        prediction = prediction.reshape(x.shape)
        return prediction if self.predicts_velocity else velocity_to(prediction, x, t[..., None, None])

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, valid_NH: Tensor, generator: torch.Generator) -> Tensor:
        """Return the flow-matching loss of demonstrated chunks, a scalar.

        It is the mean squared error of the velocity ``noise - action`` in valid rows. If the network predicts the
        action, the error of the velocity is the error of the action divided by t. This divisor is at least
        MIN_LOSS_TIME, so that times near 0, at which the prediction is easy, do not dominate. With ``max_delay`` a
        prefix of random length is given, and the loss is that of the other valid rows.
        """
        obs = draw_prefix(obs, action_NHA, valid_NH, self.max_delay, generator)
        noise, t = self.draw_path(action_NHA, generator)
        t_N11 = t[:, None, None]
        encoding = self.encode(obs)
        x = noisy_chunk(action_NHA, noise, t_N11, valid_NH, encoding.fixed)
        velocity = self.velocity_at(encoding, x, t, time_features(t))
        error = velocity - (noise - action_NHA)
        if not self.predicts_velocity:
            error = error * (t_N11 / t_N11.clamp_min(MIN_LOSS_TIME))
        return error.square()[learned_rows(valid_NH, encoding.fixed)].mean()
