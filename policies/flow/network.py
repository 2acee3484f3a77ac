"""Networks of the flow policy: an encoder that runs once a decision and a small denoiser that runs K times."""

from __future__ import annotations

from collections.abc import Sequence
from math import atanh, log, pi

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


class Denoiser(nn.Module):
    """Maps (state, x, t) to a prediction for the chunk, and to the features that the noise network reads.

    The first layer of the denoiser is the sum of a projection of the encoded state (``encode``, once a decision) and
    one of x and the features of t, so that a denoise step costs only the head.
    """

    def __init__(
        self, state_dim: int, chunk_dim: int, encoder: Sequence[int], head: Sequence[int], activation: str
    ) -> None:
        super().__init__()
        self.encoder = trunk(state_dim, encoder, activation).append(linear(encoder[-1], head[0], gain=1.0))
        self.from_flow = linear(chunk_dim + TIME_FEATURES, head[0], gain=1.0, bias=False)
        self.head = nn.Sequential(ACTIVATIONS[activation](), *trunk(head[0], head[1:], activation))
        self.output = linear(head[-1], chunk_dim, gain=0.01)

    def encode(self, state: Tensor) -> Tensor:
        """Normalised state [N, S] -> code [N, head[0]], the state's share of the denoiser's first layer."""
        code: Tensor = self.encoder(state)
        return code

    def features(self, code: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Denoiser's last hidden layer, [..., head[-1]].

        code [..., head[0]], x [..., H*A] and time (the features of t, [..., TIME_FEATURES]) broadcast to x's batch.
        """
        flow = torch.cat((x, time.expand(*x.shape[:-1], -1)), dim=-1)
        features: Tensor = self.head(code + self.from_flow(flow))
        return features


class NoiseNetwork(nn.Module):
    """Standard deviation of a denoise step from the denoiser's features, bounded, starting at ``sigma_init``.

    ``log sigma^2 = (hi + lo) / 2 + (hi - lo) / 2 * tanh(z)`` with ``lo = log sigma_min^2``, ``hi = log sigma_max^2``
    and z linear in the features. Used to explore and to train; a deployed policy has none.
    """

    def __init__(self, features: int, chunk_dim: int, sigma_min: float, sigma_max: float, sigma_init: float) -> None:
        super().__init__()
        self.log_sigma_center = 0.5 * (log(sigma_max) + log(sigma_min))
        self.log_sigma_radius = 0.5 * (log(sigma_max) - log(sigma_min))
        self.layer = linear(features, chunk_dim, gain=0.01)
        nn.init.constant_(self.layer.bias, atanh((log(sigma_init) - self.log_sigma_center) / self.log_sigma_radius))

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] -> sigma [..., H*A] in [sigma_min, sigma_max]."""
        return self.bound(self.layer(features))

    def bound(self, z: Tensor) -> Tensor:
        """The layer's output z -> sigma, of z's shape."""
        return (self.log_sigma_center + self.log_sigma_radius * torch.tanh(z)).exp()


def joint_linear(features: Tensor, first: nn.Linear, second: nn.Linear) -> tuple[Tensor, Tensor]:
    """``first(features), second(features)`` in one matrix product: for narrow outputs much cheaper than two."""
    weight, bias = torch.cat((first.weight, second.weight)), torch.cat((first.bias, second.bias))
    outputs = F.linear(features, weight, bias)
    return outputs[..., : first.out_features], outputs[..., first.out_features :]
