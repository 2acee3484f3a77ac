"""Images that other simulators observe or show, as cameras. A stack of frames is a camera for each frame.

obs: uint8 [4, 84, 84] of four grey frames ─► obs (the newest), obs_1 (one frame older), obs_2, obs_3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embodied.core.errors import UserError
from embodied.envs.adapters.gym.results import INTEGERS, WrongResult

SMALLEST_IMAGE = 16  # pixels; a smaller array of bytes is a grid of numbers
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of an observed array of bytes."""

    key: str
    """Name of the array."""
    part: tuple[int | slice, ...]
    """Where the frame is in the array of one env: [H, W], [H, W, 1 or 3], or [1 or 3, H, W]."""
    channels_first: bool = False
    """Whether the first axis of the part has its channels."""

    def write(self, array: Pixels, out: Pixels) -> None:
        """Write it into images [n, height, width, 3], for an array of n envs; grey is repeated."""
        array = array[:, *self.part]
        if array.ndim == 3:
            array = array[..., None]
        elif self.channels_first:
            array = array.transpose(0, 2, 3, 1)
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
    if axis < 0:
        return {name: Frame(key, ())}
    before = (slice(None),) * axis
    parts = [(*before, slice(at, at + each)) for at in range(channels - each, -1, -each)]
    return by_age(name, [Frame(key, part, axis == 0) for part in parts])


def frames_in(key: str, shape: tuple[int, ...]) -> list[Frame]:
    """Return the frames of an array of one env, newest first; [] if it has not the shape of an image.

    [H, W], [H, W, 1 or 3] and [1 or 3, H, W] are one frame. [k, H, W] and [k, H, W, 1 or 3] are k frames, the newest
    last; k of the former is no multiple of 3, which may as well be colours.
    """
    match shape:
        case (height, width) | (height, width, 1 | 3):
            frames = [Frame(key, ())]
        case (count, height, width, 1 | 3):
            frames = [Frame(key, (at,)) for at in reversed(range(count))]
        case (1 | 3, height, width):
            frames = [Frame(key, (), channels_first=True)]
        case (count, height, width) if count % 3:
            frames = [Frame(key, (at,)) for at in reversed(range(count))]
        case _:
            return []
    return frames if min(height, width) >= SMALLEST_IMAGE else []


def by_age(name: str, frames: Sequence[Frame]) -> dict[str, Frame]:
    """Return the frames of a stack, newest first, by camera name: ``name``, ``name_1``, ``name_2``, ..."""
    return {f"{name}_{age}" if age else name: frame for age, frame in enumerate(frames)}


def _channel_axis(shape: Sequence[int]) -> int | None:
    """Return the axis of the channels of an image, -1 if it has none; None if it is too small to be an image."""
    if len(shape) == 2:
        return -1 if min(shape) >= SMALLEST_IMAGE else None
    if len(shape) != 3:
        return None
    axis = 0 if shape[0] < shape[2] else 2
    return axis if min(shape[:2] if axis else shape[1:]) >= SMALLEST_IMAGE else None


def as_bytes(image: Any, scale: float = 1.0) -> Pixels:
    """Return an array of real numbers as bytes: booleans are black and white, other values are times ``scale``.

    ValueError for a value that is then not within 0 and 255.
    """
    image = np.asarray(image)
    pixels: Pixels
    if image.dtype == np.bool_:
        pixels = image.astype(np.uint8) * np.uint8(255)
        return pixels
    if image.dtype == np.uint8 and scale == 1.0:
        pixels = image
        return pixels
    low, high = float(image.min()) * scale, float(image.max()) * scale
    if not (low >= 0.0 and high <= 255.0):  # a NaN is neither
        raise ValueError(f"values from {low / scale:g} to {high / scale:g}, allowed: 0 to {255.0 / scale:g}")
    pixels = np.rint(image * scale).astype(np.uint8)
    return pixels


def shown(frame: Any) -> Pixels:
    """Return what ``render`` gave as bytes [H, W, 1 or 3]; RGBA loses its A. WrongResult if it is no image."""
    what = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
    wrong = f"gave {what} from render(), needed an array of bytes [height, width, 3]"
    if not isinstance(frame, np.ndarray) or 0 in frame.shape:
        raise WrongResult(wrong)
    if frame.ndim == 2:
        frame = frame[..., None]
    if frame.ndim != 3 or frame.shape[2] not in (1, 3, 4):
        raise WrongResult(wrong)
    if frame.dtype.kind not in INTEGERS:
        raise WrongResult(f"{wrong}: return (255 * frame).astype(np.uint8) if 1 is white")
    try:
        return as_bytes(frame[..., :3])
    except ValueError as error:
        raise WrongResult(f"{wrong}: it has {error}") from None


def resized(image: Pixels, width: int, height: int) -> Pixels:
    """Return bytes [H, W], [H, W, 1] or [H, W, 3] as bytes [height, width, 3]."""
    if image.ndim == 2 or image.shape[2] == 1:
        image = np.repeat(image.reshape(*image.shape[:2], 1), 3, -1)
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))
