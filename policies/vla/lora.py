"""Low-rank adaptation (LoRA, Hu et al. 2022) of the attention of a model of transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


class LoRALinear(nn.Linear):
    """A linear layer W x + B A x with a frozen weight W. Only A and B are trained; B starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), self.lora_b)


def adapt(layers: nn.Module, rank: int) -> None:
    """Replace the attention projections in ``layers`` by ``LoRALinear``, in place, and freeze all other weights."""
    layers.requires_grad_(False)
    for module in list(layers.modules()):
        for name, child in module.named_children():
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank))


def merge_adaptations(model: Any) -> Any:
    """Add every adaptation to its weight, in place, and return the model without ``LoRALinear``."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LoRALinear):
                plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                plain.weight = nn.Parameter(child.weight.detach() + (child.lora_b @ child.lora_a).detach())
                plain.bias = child.bias
                setattr(module, name, plain)
    return model
