"""The spaces of gymnasium as ours: what an environment observes, what it takes as an action, and the way between.

    observation ─► leaves (Box, Discrete, MultiDiscrete, MultiBinary) ─► terms of the state, or cameras
    action of ours ─► ``ActionCodec`` ─► action of the environment

A stack of frames is a camera for each frame: uint8 [4, 84, 84] of four grey frames ─► obs (the newest), obs_1 (one
frame older), obs_2, obs_3. Imports neither torch nor other modules of ``envs``, because processes need it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from embodied.core.errors import NeedsCameras, UserError, unknown_name
from embodied.core.spec import ActionSpace, ActionTerm, Box, CameraSpec, Discrete, MultiDiscrete, Term
from embodied.envs.adapters.gym.results import INTEGERS, NUMBERS, WrongResult, array_of

RENDER = "render"  # camera that shows what the env renders for people
BOUNDLESS = 1e15  # limits of an action that are no real ones, such as the largest float32
MOST_CHOICES = 100_000  # of a choice in the state, where it is one-hot
TIME = Term("time", 1)  # the state of an env that observes images alone: share of the time limit that has passed
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


@dataclass(frozen=True)
class Leaf:
    """A part of an observation that is not a dictionary or a tuple."""

    name: str
    """Keys that lead to it, joined by dots; ``observation`` if it is the whole."""
    path: tuple[Any, ...]
    """Keys and indices that lead to it."""
    space: Any

    @cached_property
    def frames(self) -> dict[str, Frame]:
        """Its frames by the name of their camera, newest first; {} if it is no image.

        An image is a Box with the limits 0 and 1 or 0 and 255, in a shape that ``frames_in`` knows; numbers that are no
        bytes also need an axis of 1 or 3 channels, or to be square. UserError for bytes from 0 to 255 of another shape,
        and for colours with other limits.
        """
        space, shape = self.space, self.space.shape
        if not isinstance(space, spaces.Box) or sum(side >= SMALLEST_IMAGE for side in shape) < 2:
            return {}
        frames = frames_in(self.name, shape)
        is_bytes, limits = space.dtype == np.uint8, _limits(space)
        channels = len(shape) > 2 and (shape[-1] in (1, 3) or shape[-3] in (1, 3))
        if frames and limits in ((0, 1), (0, 255)) and (is_bytes or channels or shape[-1] == shape[-2]):
            return by_age(self.name.replace(".", "_").replace("observation_", "", 1), frames)
        if is_bytes and limits == (0, 255):
            got = f"its observation '{self.name}' is an array of bytes {list(shape)}"
            needed = "[height, width], with 1 or 3 channels last or first, or a stack [frames, height, width, 1 or 3]"
            raise UserError(f"{got}; images must be {needed}")
        if frames and (shape[-1] == 3 or shape[:-2] == (3,)):
            image = f"{space.dtype} {list(shape)}, an image by its shape"
            got = f"its limits are {space.low.min():g} and {space.high.max():g}"
            cure = "with 0 and 1, or 0 and 255, it is a camera; gymnasium.wrappers.FlattenObservation makes it a vector"
            raise UserError(f"its observation '{self.name}' is {image}, but {got}: {cure}")
        return {}

    @cached_property
    def counts(self) -> NDArray[Any]:
        """Number of choices of each of its entries; none if these are numbers or bits."""
        if isinstance(self.space, (spaces.Discrete, spaces.MultiDiscrete)):
            return np.array(self.space.n if isinstance(self.space, spaces.Discrete) else self.space.nvec)
        return np.zeros(0, np.int64)

    @cached_property
    def size(self) -> int:
        """Entries in the state; a choice is one-hot."""
        return int(self.counts.sum()) if self.counts.size else int(np.prod(self.space.shape))

    def value(self, observation: Any, num: int | None = None) -> NDArray[Any]:
        """Return the part of an observation that this is, an array of the shape of its space; images as bytes.

        num: the observation is that of so many envs, and the shape begins with it. WrongResult for another shape or
        type, for a choice that does not exist and for an image whose values are beyond the limits of its space.
        """
        try:
            for key in self.path:
                observation = observation[key]
        except (KeyError, IndexError, TypeError):
            raise WrongResult(f"returned an observation without its part '{self.name}'") from None
        space, what = self.space, f"observation '{self.name}'"
        is_box = isinstance(space, spaces.Box)
        shape = space.shape if num is None else (num, *space.shape)
        kinds = NUMBERS if is_box and not (self.frames and np.issubdtype(space.dtype, np.integer)) else INTEGERS
        array = array_of(observation, shape, kinds, what)
        if is_box and not self.frames:
            return array
        if is_box:
            try:
                return as_bytes(array, 255.0 if _limits(space) == (0, 1) else 1.0)
            except ValueError as error:
                raise WrongResult(f"returned {what} with {error}") from None
        low, counts = (space.start, self.counts) if self.counts.size else (0, 2)
        if ((array < low) | (array >= low + counts)).any():
            raise WrongResult(f"returned {what} with a choice that its space {space} does not have: {array.tolist()}")
        return array

    def encoded(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values [n, ...] of n envs as entries of the state, [n, size]."""
        num = len(values)
        if not self.counts.size:
            return values.reshape(num, -1)
        places = (values - self.space.start).reshape(num, -1) + np.cumsum(self.counts) - self.counts.ravel()
        return np.asarray((places[..., None] == np.arange(self.size)).any(1))


def _limits(space: spaces.Box) -> tuple[float, float] | None:
    """Return the limits of a Box if they are those of all entries."""
    low, high = space.low, space.high
    return (float(low.min()), float(high.max())) if low.min() == low.max() and high.min() == high.max() else None


def leaves_of(space: Any, name: str = "", path: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """Yield the leaves of an observation space, in order. UserError for a space that cannot be served."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from leaves_of(part, f"{name}.{key}" if name else str(key), (*path, key))
        return
    leaf = Leaf(name or "observation", path, space)
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        got = f"its observation '{leaf.name}' is a {type(space).__name__}, which is not a vector of a fixed size"
        raise UserError(f"{got}; allowed: Dict and Tuple of Box, Discrete, MultiDiscrete and MultiBinary")
    if leaf.counts.sum() > MOST_CHOICES:
        got = f"its observation '{leaf.name}' has {leaf.counts.sum():,} choices, allowed: {MOST_CHOICES:,}"
        raise UserError(f"{got}, as each is an entry of the state; make it a Box of numbers")
    if leaf.size:
        yield leaf


def check_names(leaves: Sequence[Leaf]) -> None:
    """Raise UserError if two terms of the state, or two cameras, have one name."""
    terms: dict[str, str] = {}
    cameras = {RENDER: "the picture of render()"}
    for leaf in leaves:
        part, owners = "".join(f"[{key!r}]" for key in leaf.path), cameras if leaf.frames else terms
        for name in leaf.frames or (leaf.name,):
            if name in owners:
                raise UserError(
                    f"its observation{part} and {owners[name]} are both named '{name}' here: rename the former"
                )
            owners[name] = f"observation{part}"


def terms_of(leaves: Sequence[Leaf]) -> tuple[Term, ...]:
    """Return the terms of the state: all leaves but images."""
    return tuple(Term(leaf.name, leaf.size) for leaf in leaves if not leaf.frames)


def check_cameras(
    task: str, chosen: Sequence[CameraSpec], available: Collection[str], needed: Sequence[str], action: ActionSpace
) -> None:
    """Raise UserError for a camera that the task lacks, NeedsCameras for none if it observes ``needed`` alone."""
    for camera in chosen:
        if not available:
            raise UserError(f"task {task} has no cameras: choose a policy that gets a state vector")
        if camera.name not in available:
            raise unknown_name(f"camera of task {task}", camera.name, available)
    if needed and not chosen:
        policy = "gaussian" if isinstance(action, Box) else "categorical"
        cure = f"choose a policy that sees them, policy={policy} policy.cameras=[{','.join(needed)}]"
        raise NeedsCameras(f"task {task} observes images alone: {cure}", tuple(needed))


def action_space_of(space: Any) -> ActionSpace:
    """Return an action space of ours. UserError for one that cannot be served."""
    if isinstance(space, spaces.Discrete):
        return Discrete(tuple(map(str, range(int(space.start), int(space.start + space.n)))))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        counts = ActionCodec(space).counts
        return MultiDiscrete(tuple(f"choice[{i}]" for i in range(len(counts))), counts)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        kind = f"{type(space).__name__} of {space.dtype}" if isinstance(space, spaces.Box) else type(space).__name__
        allowed = "a Box of floating-point numbers, Discrete, MultiDiscrete, MultiBinary"
        raise UserError(f"its actions are a {kind}; allowed: {allowed}")
    if not all(space.shape):
        raise UserError(f"its actions are a Box of shape {list(space.shape)}, which has no entry")
    if not bool((np.maximum(abs(space.low), abs(space.high)) < BOUNDLESS).all()):
        limits = f"low {space.low.min():g}, high {space.high.max():g}"
        cure = "give its action_space finite ones, or wrap it in gymnasium.wrappers.TransformAction"
        raise UserError(f"its actions have no limits ({limits}), so [-1, 1] cannot be scaled to them: {cure}")
    codec = ActionCodec(space)
    terms = zip(codec.scale.ravel().tolist(), codec.offset.ravel().tolist(), strict=True)
    return Box(tuple(ActionTerm(f"action[{i}]", scale=scale, offset=at) for i, (scale, at) in enumerate(terms)))


class ActionCodec:
    """Actions of an environment from ours. space: one that ``action_space_of`` accepts."""

    def __init__(self, space: Any) -> None:
        self.space = space
        self.counts: tuple[int, ...] = ()
        """Number of choices in each dimension; none for a Box."""
        if isinstance(space, spaces.Box):
            low, high = space.low.astype(float), space.high.astype(float)
            self.scale, self.offset = (high - low) / 2, (high + low) / 2
        elif isinstance(space, spaces.MultiBinary):
            self.counts = (2,) * int(np.prod(space.shape))
        else:
            self.counts = tuple(np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).tolist())

    def decode(self, action_nA: NDArray[Any]) -> NDArray[Any]:
        """Return the environment's actions [n, ...] for n actions [n, A] of ours, float32 in [-1, 1] or int64."""
        space = self.space
        action = action_nA.reshape(-1, *space.shape)
        if isinstance(space, spaces.Box):
            action = (self.offset + self.scale * action).clip(space.low, space.high)
        elif not isinstance(space, spaces.MultiBinary):
            action = action + space.start
        return action.astype(space.dtype)
