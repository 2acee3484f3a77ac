"""Images that other simulators observe or show, as cameras. A stack of frames is a camera for each frame.

obs: uint8 [4, 84, 84] of four grey frames ─► obs (the newest), obs_1 (one frame older), obs_2, obs_3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embodied.envs.adapters.gym.results import INTEGERS, WrongResult

SMALLEST_IMAGE = 16  # pixels; a smaller array of bytes is a grid of numbers
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of an observed array of bytes."""

    key: str
    part: tuple[int | slice, ...]
    """Where the frame is in the array of one env: [H, W], [H, W, 1 or 3], or [1 or 3, H, W]."""
    channels_first: bool = False
    """Whether the first axis of the part has its channels."""

    def pixels(self, array: Pixels, height: int, width: int) -> Pixels:
        """Return the images [n, height, width, 1 or 3] of an array of n envs."""
        array = array[:, *self.part]
        if array.ndim == 3:
            array = array[..., None]
        elif self.channels_first:
            array = array.transpose(0, 2, 3, 1)
        if array.shape[1:3] == (height, width):
            return array
        return np.stack([resized(image, width, height) for image in np.ascontiguousarray(array)])


def frames_in(key: str, shape: Sequence[int]) -> list[Frame]:
    """Return the frames of an array of one env, newest first; [] if it has not the shape of an image.

    [H, W], [H, W, 1 or 3] and [1 or 3, H, W] are one frame. [k, H, W] and [k, H, W, 1 or 3] are k frames, the newest
    last; k of the former is no multiple of 3, which may as well be colours.
    """
    match tuple(shape):
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


def as_bytes(image: Any, scale: float = 1.0) -> Pixels:
    """Return an array of real numbers as bytes: booleans are black and white, other values are times ``scale``.

    ValueError for a value that is then not within 0 and 255.
    """
    array: NDArray[Any] = np.asarray(image)
    if array.dtype == np.uint8 and scale == 1.0:
        return array
    if array.dtype == np.bool_:
        scale = 255.0
    low, high = float(array.min()) * scale, float(array.max()) * scale
    if not (low >= 0.0 and high <= 255.0):  # a NaN is neither
        raise ValueError(f"values from {low / scale:g} to {high / scale:g}, allowed: 0 to {255.0 / scale:g}")
    return np.asarray(np.rint(array * scale), np.uint8)


def shown(frame: Any) -> Pixels:
    """Return what ``render`` gave as bytes [H, W, 1 or 3]; RGBA loses its A. WrongResult if it is no image."""
    is_array = isinstance(frame, np.ndarray)
    what = f"{frame.dtype} {list(frame.shape)}" if is_array else type(frame).__name__
    wrong = f"gave {what} from render(), needed an array of bytes [height, width, 3]"
    if is_array and frame.ndim == 2:
        frame = frame[..., None]
    if not is_array or not frame.size or frame.ndim != 3 or frame.shape[2] not in (1, 3, 4):
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
