"""Networks of the flow policy: an encoder that runs once per decision and a small denoiser that runs K times."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied.policies.networks import ACTIVATIONS, StdBounds, linear, trunk

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

    def unsqueeze(self, dim: int) -> StateEncoding:
        """Insert a dimension into all parts."""
        return StateEncoding(*(None if part is None else part.unsqueeze(dim) for part in self))  # type: ignore[arg-type]


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


class NoiseNetwork(nn.Module):
    """Bounded standard deviation of a denoise step from the denoiser's F features; initially ``sigma_init``.

    It is ``StdBounds`` of ``z = bias + mean(weight * features)``, with weight 0 at first. A linear layer would have a
    sum instead of the mean.
    With the mean, an optimiser like Adam moves z as fast through all weights together as through the bias. With a sum,
    exploration would collapse F times faster than that of a Gaussian policy with a free log-std. A deployed policy does
    not need this network.
    """

    def __init__(self, features: int, chunk_dim: int, sigma_min: float, sigma_max: float, sigma_init: float) -> None:
        super().__init__()
        self.bounds = StdBounds(sigma_min, sigma_max)
        self.weight = nn.Parameter(torch.zeros(chunk_dim, features))
        self.bias = nn.Parameter(torch.full((chunk_dim,), self.bounds.inverse(sigma_init)))

    def forward(self, features: Tensor) -> Tensor:
        """Return sigma [..., H*A] in [sigma_min, sigma_max] for features [..., F]."""
        return self.bound(F.linear(features, self.scaled_weight()))

    def scaled_weight(self) -> Tensor:
        """Return the weight [H*A, F] whose product with the features is ``mean(weight * features)``."""
        return self.weight / self.weight.shape[1]

    def bound(self, z: Tensor) -> Tensor:
        """Return sigma [..., H*A] for the product of features and scaled weight, [..., H*A]."""
        return self.bounds.std(z + self.bias)
