"""A flow policy on the state vector, trainable by RL from scratch and by imitation.

An encoder runs once per decision, a small denoiser K times.
"""

from collections.abc import Sequence
from math import pi
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies.config import FlowConfig
from embodied.policies.flow.chains import FlowChains
from embodied.policies.flow.prefix import draw_prefix, learned_rows, noisy_chunk
from embodied.policies.flow.step import time_grid, velocity_to
from embodied.policies.networks import ACTIVATIONS, NoiseNetwork, linear, trunk

MIN_LOSS_TIME = 0.05  # lower bound of t in the 1/t weight of the imitation loss, as in Li & He (2025)
TIME_FEATURES = 16


def time_features(t: Tensor) -> Tensor:
    """Return sines and cosines of flow times t [...] with periods from 0.25 to 4, [..., TIME_FEATURES]."""
    octaves = torch.linspace(-1.0, 3.0, TIME_FEATURES // 2, dtype=t.dtype, device=t.device)
    angle = t.unsqueeze(-1) * (pi * 2.0**octaves)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class StateEncoding(NamedTuple):
    """An encoded state vector: all that the denoise steps of a decision share."""

    state: Tensor
    """Normalised state, then prefix and delay if there are any, [..., S]."""
    first: Tensor
    """Contribution to the denoiser's first layer, [..., head[0]]."""
    direct: Tensor
    """Contribution to the prediction, [..., H*A]."""
    fixed: Tensor | None = None
    """Rows of the chunk that the prefix gives, bool [..., H, 1]; None without a prefix."""


class Denoiser(nn.Module):
    """A network that maps (state, x, t) to a prediction for the chunk, and to features for the noise network.

    ``encode`` runs once per decision. It computes the state's contributions to the denoiser's first layer and to the
    prediction. A denoise step adds x and the features of t and runs only the head. The direct contribution to the
    prediction learns the mean action as fast as a plain MLP does; the head refines it.
    """

    def __init__(
        self, state_dim: int, chunk_dim: int, encoder: Sequence[int], head: Sequence[int], activation: str
    ) -> None:
        super().__init__()
        self.encoder = trunk(state_dim, encoder, activation)
        self.to_head = linear(encoder[-1], head[0], gain=1.0)
        self.direct = linear(encoder[-1], chunk_dim, gain=0.01)
        self.from_flow = linear(chunk_dim + TIME_FEATURES, head[0], gain=1.0, bias=False)
        self.head = nn.Sequential(ACTIVATIONS[activation](), *trunk(head[0], head[1:], activation))
        self.output = linear(head[-1], chunk_dim, gain=0.01, bias=False)

    def encode(self, state: Tensor) -> StateEncoding:
        """Encode a normalised state [N, S] for all denoise steps of the decision."""
        encoded = self.encoder(state)
        return StateEncoding(state, self.to_head(encoded), self.direct(encoded))

    def features(self, encoding: StateEncoding, x: Tensor, time: Tensor) -> Tensor:
        """Return the last hidden layer of the denoiser, [..., head[-1]].

        x: [..., H*A]. time: features of t, [..., TIME_FEATURES]. encoding and time broadcast to the batch of x.
        """
        flow = torch.cat((x, time.expand(*x.shape[:-1], -1)), dim=-1)
        features: Tensor = self.head(encoding.first + self.from_flow(flow))
        return features

    def predict(self, encoding: StateEncoding, features: Tensor) -> Tensor:
        """Return the prediction [..., H*A]: clean action or velocity, as the policy is configured."""
        prediction: Tensor = self.output(features) + encoding.direct
        return prediction

    def predict_jointly(self, encoding: StateEncoding, features: Tensor, noise: NoiseNetwork) -> tuple[Tensor, Tensor]:
        """Return ``predict(encoding, features), noise(features)``, computed by one matrix product to save time."""
        joint = F.linear(features, torch.cat((self.output.weight, noise.scaled_weight())))
        prediction, z = joint.chunk(2, dim=-1)
        return prediction + encoding.direct, noise.bound(z)


class FlowPolicy(FlowChains):
    """A flow policy on the state vector; W = A.

    By default the network predicts the clean action f(x, t, state), and the velocity is ``(x - f) / t`` (x-prediction:
    Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise"). The last Euler step then ends exactly at
    f, so the initial noise does not reach the action. An untrained policy is a Gaussian around f ~ 0 with the last
    step's sigma, and RL from scratch starts like PPO with a Gaussian policy. ``prediction: velocity`` is as in π0.
    """

    recordable = True
    must_match = ("activation", "prediction")
    must_match_exploring = ("sigma_min", "sigma_max")
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
        return encoding._replace(first=encoding.first.unsqueeze(1), direct=encoding.direct.unsqueeze(1))

    def encoded_value(self, encoding: StateEncoding, obs: Obs) -> Tensor:
        return self.state_value(encoding.state, obs)

    def value(self, obs: Obs) -> Tensor:
        """Return the critic's value of each row of obs, [N], without running the encoder."""
        return self.state_value(self.with_prefix(self.normalized_state(obs), obs), obs)

    def velocity(self, encoding: StateEncoding, x: Tensor, k: int | slice | Tensor) -> Tensor:
        return self.velocity_at(encoding, x, self.grid[k], self.grid_features[k])

    def velocity_at(self, encoding: StateEncoding, x: Tensor, t: Tensor, time: Tensor) -> Tensor:
        """Return the velocity at x [..., H, A] at any times t [...] with features ``time`` [..., TIME_FEATURES]."""
        features = self.denoiser.features(encoding, x.flatten(-2), time)
        return self.to_velocity(self.denoiser.predict(encoding, features), x, t)

    def noisy_velocity(self, encoding: StateEncoding, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
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
