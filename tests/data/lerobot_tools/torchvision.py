"""Stand in for torchvision, which LeRobot's data set modules import and which has no build for a CPU torch.

It is not torchvision: it has the one transform with which LeRobot turns a stored picture into a tensor, and nothing
else. Any other use raises. LeRobot decodes videos through torchvision or torchcodec, so that is not tested.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image


class ToTensor:
    """Turn an RGB picture into float32 [3, h, w] in [0, 1], as torchvision documents it."""

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


transforms = SimpleNamespace(ToTensor=ToTensor)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the stand-in for torchvision has no {name}")
