"""Layers and activations of small networks, with their initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def linear(inputs: int, outputs: int, gain: float = sqrt(2.0), bias: bool = True) -> nn.Linear:
    """Build a linear layer with orthogonal weights scaled by ``gain`` and zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.orthogonal_(layer.weight, gain)
    if bias:
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
