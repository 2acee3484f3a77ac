"""The spaces of gymnasium as ours: what an environment observes, what it takes as an action, and the way between.

    observation ─► leaves (Box, Discrete, MultiDiscrete, MultiBinary) ─► terms of the state, or cameras
    action of ours ─► ``ActionCodec`` ─► action of the environment

Imports neither torch nor other modules of ``envs``, because the processes of ``gym_rows`` need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from embodied.core.errors import UserError
from embodied.core.spec import ActionSpace, ActionTerm, Box, CameraSpec, Discrete, MultiDiscrete, Term

RENDER = "render"  # camera that shows what the env renders for people
TIME = Term("time", 1)  # the state of an env that observes images alone: share of the time limit that has passed
SMALLEST_IMAGE = 16  # pixels; a smaller array of bytes is a grid of numbers
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of an observation that is not a dictionary or a tuple."""

    name: str
    """Keys that lead to it, joined by dots; ``observation`` if it is the whole."""
    path: tuple[Any, ...]
    """Keys and indices that lead to it."""
    space: Any
    """Its space."""

    @property
    def is_image(self) -> bool:
        """Whether it is an image: bytes [H, W], [H, W, 1] or [H, W, 3] of at least ``SMALLEST_IMAGE`` pixels a side."""
        shape = self.space.shape
        if not isinstance(self.space, spaces.Box) or self.space.dtype != np.uint8 or len(shape) not in (2, 3):
            return False
        return min(shape[:2]) >= SMALLEST_IMAGE and (len(shape) == 2 or shape[2] in (1, 3))

    @property
    def camera(self) -> CameraSpec:
        """The camera of an image, in its own size."""
        return CameraSpec(self.name.replace(".", "_").replace("observation_", "", 1), *self.space.shape[:2])

    @property
    def size(self) -> int:
        """Entries in the state; a choice is one-hot."""
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.n)
        if isinstance(self.space, spaces.MultiDiscrete):
            return int(self.space.nvec.sum())
        return int(np.prod(self.space.shape))

    def value(self, observation: Any) -> Any:
        """Return the part of an observation that this is."""
        for key in self.path:
            observation = observation[key]
        return observation

    def encode(self, value: Any, out: NDArray[np.float32]) -> None:
        """Write a value of it as entries of the state [size]. ValueError for a value of another size."""
        value = np.asarray(value)
        if isinstance(self.space, spaces.Discrete):
            out[:] = 0.0
            out[int(value) - int(self.space.start)] = 1.0
        elif isinstance(self.space, spaces.MultiDiscrete):
            out[:] = 0.0
            counts = self.space.nvec.ravel()
            out[np.cumsum(counts) - counts + (value - self.space.start).ravel()] = 1.0
        elif value.size != len(out):
            raise ValueError(f"observation '{self.name}': got shape {value.shape}, its space has {self.space.shape}")
        else:
            out[:] = value.ravel()


def leaves_of(space: Any, name: str = "", path: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """Yield the leaves of an observation space, in order. UserError for a space that cannot be served."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from leaves_of(part, f"{name}.{key}" if name else str(key), (*path, key))
        return
    leaf = Leaf(name or "observation", path, space)
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise UserError(
            f"its observation '{leaf.name}' is a {type(space).__name__}, which is not a vector of a fixed size; "
            "allowed: Dict and Tuple of Box, Discrete, MultiDiscrete and MultiBinary"
        )
    shape = space.shape or ()
    if space.dtype == np.uint8 and sum(side >= SMALLEST_IMAGE for side in shape) > 1 and not leaf.is_image:
        raise UserError(
            f"its observation '{leaf.name}' is an array of bytes {list(shape)}; images must be [height, width, 3], "
            "[height, width, 1] or [height, width]"
        )
    if leaf.size:
        yield leaf


def terms_of(leaves: Sequence[Leaf]) -> tuple[Term, ...]:
    """Return the terms of the state: all leaves but images."""
    return tuple(Term(leaf.name, leaf.size) for leaf in leaves if not leaf.is_image)


def cameras_of(leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    """Return the images by the name of their camera."""
    return {leaf.camera.name: leaf for leaf in leaves if leaf.is_image}


def images_alone(task: str, cameras: Iterable[str], has_choices: bool) -> UserError:
    """Return the error for a policy without cameras in a task that observes images alone.

    cameras: names of its images. has_choices: whether its actions are choices.
    """
    policy = "categorical" if has_choices else "gaussian"
    return UserError(
        f"task {task} observes images alone: choose a policy that sees them, "
        f"policy={policy} policy.cameras=[{','.join(cameras)}]"
    )


def resized(image: Any, width: int, height: int) -> Pixels:
    """Return an image [H, W], [H, W, 1] or [H, W, 3] as bytes [height, width, 3]."""
    pixels = np.asarray(image, np.uint8)
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        pixels = np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, -1)
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX))


def action_space_of(space: Any) -> ActionSpace:
    """Return an action space of ours. UserError for one that cannot be served."""
    if isinstance(space, spaces.Discrete):
        return Discrete(tuple(map(str, range(int(space.start), int(space.start + space.n)))))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        nvec = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
        counts = [int(n) for n in nvec.ravel()]
        return MultiDiscrete(tuple(f"choice[{i}]" for i in range(len(counts))), tuple(counts))
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        kind = f"{type(space).__name__} of {space.dtype}" if isinstance(space, spaces.Box) else type(space).__name__
        raise UserError(
            f"its actions are a {kind}; allowed: a Box of floating-point numbers, Discrete, MultiDiscrete, MultiBinary"
        )
    if not bool((np.isfinite(space.low) & np.isfinite(space.high)).all()):
        raise UserError(
            f"its actions have no limits (low {space.low.min():g}, high {space.high.max():g}), so [-1, 1] cannot be "
            "scaled to them: wrap it in gymnasium.wrappers.RescaleAction"
        )
    low, high = space.low.ravel().astype(float), space.high.ravel().astype(float)
    return Box(
        tuple(
            ActionTerm(f"action[{i}]", scale=float(high[i] - low[i]) / 2, offset=float(high[i] + low[i]) / 2)
            for i in range(len(low))
        )
    )


class ActionCodec:
    """Actions of an environment from ours."""

    def __init__(self, space: Any) -> None:
        self.space = space
        if isinstance(space, spaces.Box):
            low, high = space.low.astype(float), space.high.astype(float)
            self.scale, self.offset = (high - low) / 2, (high + low) / 2
        ours = action_space_of(space)
        self.counts = () if isinstance(ours, Box) else ours.counts
        """Number of choices in each dimension; none for a Box."""

    def decode(self, action_nA: NDArray[Any]) -> NDArray[Any]:
        """Return the environment's actions [n, ...] for n actions [n, A] of ours, float32 in [-1, 1] or int64."""
        space = self.space
        decoded: NDArray[Any]
        if isinstance(space, spaces.Discrete):
            decoded = action_nA[:, 0] + space.start
            return decoded.astype(space.dtype)
        action = action_nA.reshape(-1, *space.shape)
        if isinstance(space, spaces.MultiDiscrete):
            decoded = action + space.start
        elif isinstance(space, spaces.MultiBinary):
            decoded = action
        else:
            decoded = (self.offset + self.scale * action).clip(space.low, space.high)
        return decoded.astype(space.dtype)


def mask_of(env: Any, info: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    """Return the allowed choices, bool [C], from ``info["action_mask"]`` or ``env.action_masks()``; None without."""
    mask: Any = info.get("action_mask")
    if mask is None:
        if not env.has_wrapper_attr("action_masks"):
            return None
        mask = env.get_wrapper_attr("action_masks")()
    return flat_mask(mask)


def flat_mask(mask: Any) -> NDArray[np.bool_]:
    """Return the allowed choices, bool [C], of a mask or of one mask for each entry of an action."""
    parts = mask if isinstance(mask, (tuple, list)) else [mask]
    return np.concatenate([np.asarray(part, dtype=np.bool_).ravel() for part in parts])
