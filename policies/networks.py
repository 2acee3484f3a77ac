"""Layers and activations of small networks with their initialisation, and learned standard deviations."""

from collections.abc import Sequence
from math import atanh, log, sqrt
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LayerT = TypeVar("LayerT", nn.Linear, nn.Conv2d)

ACTIVATIONS: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


def linear(inputs: int, outputs: int, gain: float = sqrt(2.0), bias: bool = True) -> nn.Linear:
    """Build a linear layer with orthogonal weights scaled by ``gain`` and zero bias."""
    return orthogonal(nn.Linear(inputs, outputs, bias=bias), gain)


def orthogonal(layer: LayerT, gain: float = sqrt(2.0)) -> LayerT:
    """Give a layer orthogonal weights scaled by ``gain`` and zero bias; return it."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def trunk(inputs: int, hidden: Sequence[int], activation: str) -> nn.Sequential:
    """Build hidden layers, each followed by the activation: [..., inputs] -> [..., hidden[-1]]."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [linear(inputs, width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers)


def mlp(inputs: int, hidden: Sequence[int], outputs: int, activation: str, gain: float) -> nn.Sequential:
    """Build a trunk and a linear output layer with weights scaled by ``gain``: [..., inputs] -> [..., outputs]."""
    return trunk(inputs, hidden, activation).append(linear(hidden[-1], outputs, gain))


class StdBounds:
    """Map real numbers z to standard deviations in (lowest, highest), with a gradient everywhere.

    ``log std = (hi + lo) / 2 + (hi - lo) / 2 * tanh(z)`` with ``lo = log lowest`` and ``hi = log highest``.
    """

    def __init__(self, lowest: float, highest: float) -> None:
        self.center = 0.5 * (log(highest) + log(lowest))
        self.radius = 0.5 * (log(highest) - log(lowest))

    def std(self, z: Tensor) -> Tensor:
        """Return the standard deviations for z, in the shape of z."""
        return (self.center + self.radius * torch.tanh(z)).exp()

    def inverse(self, std: float) -> float:
        """Return the z of a standard deviation between the bounds."""
        return atanh((log(std) - self.center) / self.radius)


class BoundedStd(nn.Module):
    """A learned standard deviation within bounds, which does not depend on the observation."""

    def __init__(self, shape: tuple[int, ...], lowest: float, highest: float, initial: float) -> None:
        super().__init__()
        self.bounds = StdBounds(lowest, highest)
        self.z = nn.Parameter(torch.full(shape, self.bounds.inverse(initial)))

    def forward(self) -> Tensor:
        """Return the standard deviation, in the shape given to the constructor."""
        return self.bounds.std(self.z)


class NoiseNetwork(nn.Module):
    """Bounded standard deviation of a denoise step from the denoiser's F features; initially ``sigma_init``.

    It is ``StdBounds`` of ``z = bias + mean(weight * features)``, with weight 0 at first. With the mean, an optimiser
    like Adam moves z as fast through all weights together as through the bias. With the sum of a linear layer,
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
