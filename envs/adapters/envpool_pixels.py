"""Images that EnvPool observes, as cameras. A stack of frames is a camera for each frame.

obs: uint8 [4, 84, 84] of four grey frames ─► obs (the newest), obs_1 (one frame older), obs_2, obs_3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodied.core.errors import UserError
from embodied.envs.adapters.gym_spaces import SMALLEST_IMAGE, Pixels, resized


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of an observed array of bytes."""

    key: str
    """EnvPool's name of the array."""
    channels: slice
    """Its channels, one (grey) or three (RGB)."""
    axis: int
    """Axis of the channels in the array of one env: 0, 2, or -1 if there is none."""

    def write(self, array: Pixels, out: Pixels) -> None:
        """Write it into images [n, height, width, 3], for an array of n envs; grey is repeated."""
        if self.axis == 0:
            array = array[:, self.channels].transpose(0, 2, 3, 1)
        else:
            array = array[..., None] if self.axis < 0 else array[..., self.channels]
        if array.shape[1:3] == out.shape[1:3]:
            out[:] = array
            return
        height, width = out.shape[1:3]
        for image, target in zip(np.ascontiguousarray(array), out, strict=True):
            target[:] = resized(image, width, height)


def frames_of(task: str, name: str, key: str, shape: Sequence[int], stack: int) -> dict[str, Frame]:
    """Return the frames of an array of bytes of this shape by camera name, the newest first; {} if it is no image.

    name: of the newest. stack: number of frames, the newest last. UserError for frames of other than 1 or 3 channels.
    """
    axis = _channel_axis(shape)
    if axis is None:
        return {}
    channels = 1 if axis < 0 else shape[axis]
    each = channels // stack
    if each * stack != channels or each not in (1, 3):
        raise UserError(
            f"task={task} observes images of {channels} channels in {stack} frames ({name}: uint8 {list(shape)}); "
            "supported: frames of 1 or 3 channels"
        )
    starts = range(channels - each, -1, -each)
    return {f"{name}_{age}" if age else name: Frame(key, slice(at, at + each), axis) for age, at in enumerate(starts)}


def _channel_axis(shape: Sequence[int]) -> int | None:
    """Return the axis of the channels of an image, -1 if it has none; None if it is too small to be an image."""
    if len(shape) == 2:
        return -1 if min(shape) >= SMALLEST_IMAGE else None
    if len(shape) != 3:
        return None
    axis = 0 if shape[0] < shape[2] else 2
    return axis if min(shape[:2] if axis else shape[1:]) >= SMALLEST_IMAGE else None
