"""Networks of the flow policy: an encoder that runs once a decision and a small denoiser that runs K times."""

from __future__ import annotations

from collections.abc import Sequence
from math import atanh, log, pi
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.networks import ACTIVATIONS, linear, trunk

TIME_FEATURES = 16


def time_features(t: Tensor) -> Tensor:
    """Sines and cosines of flow times t [...] with periods from 0.25 to 4, [..., TIME_FEATURES]."""
    octaves = torch.linspace(-1.0, 3.0, TIME_FEATURES // 2, dtype=t.dtype, device=t.device)
    angle = t.unsqueeze(-1) * (pi * 2.0**octaves)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class StateEncoding(NamedTuple):
    """A normalised state [..., S], its share of the denoiser's first layer [..., head[0]] and of the prediction
    [..., H*A]."""

    state: Tensor
    first: Tensor
    direct: Tensor

    def unsqueeze(self, dim: int) -> StateEncoding:
        return StateEncoding(*(part.unsqueeze(dim) for part in self))


class Denoiser(nn.Module):
    """Maps (state, x, t) to a prediction for the chunk, and to the features that the noise network reads.

    The state is encoded once a decision (``encode``) into its share of the denoiser's first layer and a direct
    contribution to the prediction; a denoise step adds x and the features of t, and costs only the head. The direct
    contribution lets the mean of the actions be learnt as fast as by a plain MLP, the head refines it.
    """

    def __init__(
        self, state_dim: int, chunk_dim: int, encoder: Sequence[int], head: Sequence[int], activation: str
    ) -> None:
        super().__init__()
        self.first_width = head[0]
        self.encoder = trunk(state_dim, encoder, activation)
        self.to_head = linear(encoder[-1], head[0], gain=1.0)
        self.direct = linear(encoder[-1], chunk_dim, gain=0.01)
        self.from_flow = linear(chunk_dim + TIME_FEATURES, head[0], gain=1.0, bias=False)
        self.head = nn.Sequential(ACTIVATIONS[activation](), *trunk(head[0], head[1:], activation))
        self.output = linear(head[-1], chunk_dim, gain=0.01, bias=False)

    def encode(self, state: Tensor) -> StateEncoding:
        """Normalised state [N, S] -> what every denoise step of this decision shares."""
        encoded = self.encoder(state)
        return StateEncoding(state, self.to_head(encoded), self.direct(encoded))

    def features(self, code: StateEncoding, x: Tensor, time: Tensor) -> Tensor:
        """Denoiser's last hidden layer, [..., head[-1]].

        x [..., H*A]; code and time (the features of t, [..., TIME_FEATURES]) broadcast to the batch of x.
        """
        flow = torch.cat((x, time.expand(*x.shape[:-1], -1)), dim=-1)
        features: Tensor = self.head(code.first + self.from_flow(flow))
        return features

    def predict(self, code: StateEncoding, features: Tensor) -> Tensor:
        """The prediction [..., H*A]: the clean action or the velocity, as the policy is configured."""
        prediction: Tensor = self.output(features) + code.direct
        return prediction

    def predict_jointly(self, code: StateEncoding, features: Tensor, noise: NoiseNetwork) -> tuple[Tensor, Tensor]:
        """``predict(code, features), noise(features)`` in one matrix product: the outputs are narrow."""
        joint = F.linear(features, torch.cat((self.output.weight, noise.scaled_weight())))
        prediction, z = joint.chunk(2, dim=-1)
        return prediction + code.direct, noise.bound(z)


class NoiseNetwork(nn.Module):
    """Standard deviation of a denoise step from the denoiser's features, bounded, starting at ``sigma_init``.

    ``log sigma^2 = (hi + lo) / 2 + (hi - lo) / 2 * tanh(z)``, ``lo = log sigma_min^2``, ``hi = log sigma_max^2`` and
    ``z = bias + mean(weight * features)``, weight 0 at first. The mean, where a linear layer has a sum, makes an
    optimiser like Adam move z as fast through all the weights together as through the bias: with a sum exploration
    collapses F times faster than that of a Gaussian policy with a free log-std. A deployed policy has no such network.
    """

    def __init__(self, features: int, chunk_dim: int, sigma_min: float, sigma_max: float, sigma_init: float) -> None:
        super().__init__()
        self.log_sigma_center = 0.5 * (log(sigma_max) + log(sigma_min))
        self.log_sigma_radius = 0.5 * (log(sigma_max) - log(sigma_min))
        z_init = atanh((log(sigma_init) - self.log_sigma_center) / self.log_sigma_radius)
        self.weight = nn.Parameter(torch.zeros(chunk_dim, features))
        self.bias = nn.Parameter(torch.full((chunk_dim,), z_init))

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] -> sigma [..., H*A] in [sigma_min, sigma_max]."""
        return self.bound(F.linear(features, self.scaled_weight()))

    def scaled_weight(self) -> Tensor:
        """The weight [H*A, F] whose product with the features is the mean above."""
        return self.weight / self.weight.shape[1]

    def bound(self, z: Tensor) -> Tensor:
        """Product of features and scaled weight, [..., H*A] -> sigma."""
        return (self.log_sigma_center + self.log_sigma_radius * torch.tanh(z + self.bias)).exp()
