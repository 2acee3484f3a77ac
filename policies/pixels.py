"""Images for policies with small networks: the convolutions that read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from embodied.policies.config import SMALLEST_IMAGE, PixelConfig
from embodied.policies.networks import ACTIVATIONS, orthogonal

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # filters, size of the kernel, stride
PERIOD = 8  # they reach the last pixel of images with SMALLEST_IMAGE pixels, or a multiple of PERIOD more


def encoder_of(spec: EnvSpec, config: PixelConfig) -> PixelEncoder | None:
    """Return the convolutions for the images of the cameras; None without cameras.

    UserError for cameras in a task of several goals: its instructions name the goal, and these policies read none.
    """
    if not config.cameras:
        return None
    if len({instruction.goal for instruction in spec.instructions}) > 1:
        why = f"the instructions of task {spec.task} name one of several goals, and this policy cannot read them"
        raise UserError(f"policy.cameras: {why}: use policy=vla or vla_tiny")
    return PixelEncoder(config)


class PixelEncoder(nn.Module):
    """The convolutions of Mnih et al. (2015) over the stacked images.

    Zeros are added at the right and the lower edge where the strides would otherwise leave out the last pixels.

    size: D, the number of features.
    """

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.cameras, self.grey = config.cameras, config.grey
        padding = (SMALLEST_IMAGE - config.image_size) % PERIOD
        channels, side = len(config.cameras) * (1 if config.grey else 3), config.image_size + padding
        layers: list[nn.Module] = [nn.ZeroPad2d((0, padding, 0, padding))]
        for filters, kernel, stride in CONVOLUTIONS:
            layers += [orthogonal(nn.Conv2d(channels, filters, kernel, stride)), ACTIVATIONS[config.activation]()]
            channels, side = filters, (side - kernel) // stride + 1
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.size = channels * side * side

    def forward(self, obs: Obs) -> Tensor:
        """Return the features [N, D] of images uint8 [N, h, w, 3] of all cameras."""
        images = torch.stack([obs[f"images.{camera}"] for camera in self.cameras], 3)  # [N, h, w, cameras, 3]
        pixels = images.sum(-1, dtype=torch.int16).float().div_(3) if self.grey else images.flatten(3).float()
        features: Tensor = self.layers(pixels.div_(255).movedim(-1, 1))
        return features
