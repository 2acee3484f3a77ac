"""Environments of gymnasium, stepped one after the other: the rows of a batch of arrays.

    start(ids, seeds) ─► env.reset(seed=...) ─┐
    step(ids)         ─► env.step(...)        ├─► arrays: state, images, action_mask, reward, terminated, truncated, ...
                                              ┘
What an environment returns is checked here, once (``results``). The arrays may lie in memory that processes share.
Imports neither torch nor modules of ``envs`` that do, because the processes of ``processes`` need it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from embodied.core.errors import UserError, describe_error
from embodied.envs.adapters.gym.results import (
    NUMBERS,
    WrongResult,
    advice,
    mask_of,
    reset_of,
    staying,
    step_of,
    truth,
)
from embodied.envs.adapters.gym.source import Source, class_of
from embodied.envs.adapters.gym.spaces import RENDER, ActionCodec, Leaf, leaves_of
from embodied.envs.adapters.pixels import Pixels, resized, shown

Ints = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class ArrayLayout:
    """The arrays of N environments: for each key the shape of a row and its type."""

    rows: dict[str, tuple[tuple[int, ...], str]]
    """By key."""

    def offsets(self, num_envs: int) -> tuple[dict[str, int], int]:
        """Return where each array begins in one piece of memory, and the size of that, in bytes."""
        found, end = {}, 0
        for key, (shape, dtype) in self.rows.items():
            found[key] = end
            size = num_envs * int(np.prod(shape)) * np.dtype(dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return found, max(end, ALIGNMENT)

    def arrays(self, num_envs: int, memory: Any = None) -> Arrays:
        """Return the arrays [N, ...], views of ``memory`` if it is given."""
        offsets, size = self.offsets(num_envs)
        memory = bytearray(size) if memory is None else memory
        return {
            key: np.ndarray((num_envs, *shape), dtype, memory, offsets[key])
            for key, (shape, dtype) in self.rows.items()
        }


class Rows(Protocol):
    """N environments that write their results into ``arrays``."""

    arrays: Arrays
    """Results [N, ...], and the actions that the next step takes."""

    def start(self, ids: Ints, seeds: Ints) -> None:
        """Begin an episode in each of envs ``ids``."""
        ...

    def step(self, ids: Ints) -> None:
        """Make a control step of envs ``ids`` with ``arrays["action"]``."""
        ...

    def render(self, width: int, height: int) -> Pixels:
        """Return what every env shows people, [N, height, width, 3]."""
        ...

    def close(self) -> None:
        """Close the environments."""
        ...


class EncodedRows(ABC):
    """The way of observations into arrays, and errors. Subclasses build the environments and step them."""

    def __init__(self, source: Source, arrays: Arrays, observation: Any, action: Any) -> None:
        """observation, action: spaces of one environment."""
        self.source, self.arrays = source, arrays
        leaves = list(leaves_of(observation))
        self.codec = ActionCodec(action)
        self.parts: list[tuple[Leaf, slice]] = []
        begin = 0
        for leaf in leaves:
            if not leaf.frames:
                self.parts.append((leaf, slice(begin, begin + leaf.size)))
                begin += leaf.size
        wanted = {key.removeprefix("images."): array for key, array in arrays.items() if key.startswith("images.")}
        self.images = [
            (leaf, [(frame, wanted[name]) for name, frame in leaf.frames.items() if name in wanted])
            for leaf in leaves
            if not wanted.keys().isdisjoint(leaf.frames)
        ]
        self.rendered = wanted.get(RENDER)
        self.seed_N = np.zeros(len(arrays["reward"]), np.int64)
        self.step_N = np.zeros(len(arrays["reward"]), np.int64)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn whatever code of an environment raises in the block into UserError; ``os._exit`` raises, too."""
        with staying():
            try:
                yield
            except (Exception, SystemExit) as error:  # an environment of others may raise anything
                raise self.failure(error) from error

    @abstractmethod
    def failure(self, error: BaseException) -> UserError:
        """Return the error for what an environment has raised or returned."""

    def write_mask(self, i: int, mask: NDArray[np.bool_] | None) -> None:
        """Write the allowed choices of env ``i``, all without a mask. WrongResult if there is none."""
        row = self.arrays["action_mask"][i]
        row[:] = True
        if mask is None:
            return
        if mask.shape != row.shape:
            raise WrongResult(f"returned action_mask of shape {list(mask.shape)}, needed {list(row.shape)}")
        row[:] = mask
        begin = 0
        for count in self.codec.counts:
            if not mask[begin : begin + count].any():
                raise WrongResult("returned action_mask that allows no choice, and the episode has not ended")
            begin += count

    def check_finite(self, ids: Ints) -> None:
        """Raise UserError for a state or a reward of envs ``ids`` that is not finite."""
        for key in ("state", "reward") if self.parts else ("reward",):
            if np.isfinite(self.arrays[key]).all():
                continue
            finite = np.isfinite(self.arrays[key][ids].reshape(len(ids), -1)).all(-1)
            if not finite.all():
                raise self.error(int(ids[~finite][0]), f"gave a value of {key} that is not finite")

    def error(self, i: int, what: str, cure: str = "") -> UserError:
        """Return the error for what env ``i`` did, with its control step and its seed."""
        step = f"control step {self.step_N[i]}" if self.step_N[i] else "reset"
        when = f"({step} of the episode with seed {self.seed_N[i]})"
        return UserError(f"task {self.source.name}: env {i} {what} {when}{cure}")


class LocalRows(EncodedRows):
    """Environments of this process. UserError, with the env, step and seed, for whatever goes wrong in one."""

    def __init__(self, source: Source, arrays: Arrays, ids: Sequence[int], render: bool) -> None:
        """Build the envs ``ids`` of those that ``arrays`` are for."""
        self.ids = list(ids)
        self.at = self.ids[0]  # env whose code runs, or ran last
        self.envs: dict[int, gymnasium.Env[Any, Any]] = {}
        for i in self.ids:
            self.envs[i] = source.build(render)
        first = self.envs[self.ids[0]]
        super().__init__(source, arrays, first.observation_space, first.action_space)
        self.thread = threading.get_ident()  # that has built them
        self.is_state = (
            isinstance(first.observation_space, Box)
            and [leaf.space.shape for leaf, _ in self.parts] == [first.observation_space.shape[:1]]
            and self.rendered is None
            and not source.has_mask
        )
        """Whether an observation is the state as it is, which saves time."""
        self.usual_states = {(first.observation_space.shape, kind) for kind in NUMBERS}

    def start(self, ids: Ints, seeds: Ints) -> None:
        self.seed_N[ids], self.step_N[ids] = seeds, 0
        with self.guarded():
            for i, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
                self.at = i
                observation, info = reset_of(self.envs[i].reset(seed=seed))
                self._observe(i, observation, info, ended=False)
        self.check_finite(ids)

    def step(self, ids: Ints) -> None:
        self.step_N[ids] += 1
        state_NS = self.arrays["state"] if self.is_state else None
        results: list[Any] = []
        rows = ids.tolist()
        with self.guarded():
            for i, action in zip(rows, self.codec.decode(self.arrays["action"][ids]), strict=True):
                self.at = i
                result = self.envs[i].step(action)
                if state_NS is None:
                    self._write(i, result)
                    continue
                results.append(result)
                try:
                    state_NS[i] = result[0]  # at once, because the next env may use the same array
                except (TypeError, ValueError, LookupError):
                    self._write(i, result)  # says what is wrong with it
            if state_NS is not None and not self._write_together(ids, results):
                for i, result in zip(rows, results, strict=True):
                    self.at = i
                    self._write(i, result)
        self.check_finite(ids)

    def render(self, width: int, height: int) -> Pixels:
        frames = []
        with self.guarded():
            for i in self.ids:
                self.at = i
                frames.append(resized(self._frame(i), width, height))
        return np.stack(frames)

    def close(self) -> None:
        for env in self.envs.values():
            env.close()
        self.envs = {}

    def failure(self, error: BaseException) -> UserError:
        if isinstance(error, WrongResult):
            return self.error(self.at, f"of {class_of(self.envs[self.at])} {error}")
        return self.error(self.at, f"raised {describe_error(error)}", advice(error, self.thread))

    def _frame(self, i: int) -> Pixels:
        """Return what env ``i`` shows people, bytes [H, W, 1 or 3]. WrongResult if that is no image."""
        env = self.envs[i]
        if type(env.unwrapped).render is gymnasium.Env.render:
            raise WrongResult("has no render(), although its metadata name the render mode rgb_array")
        return shown(env.render())

    def _write(self, i: int, result: Any) -> None:
        """Write the result of a step of env ``i``."""
        observation, reward, terminated, truncated, info = step_of(result)
        found: dict[str, Any] = {"reward": reward, "terminated": terminated, "truncated": truncated}
        if self.source.success is not None:
            found["success"] = truth(info.get(self.source.success, False), f"info['{self.source.success}']")
        for key, value in found.items():
            self.arrays[key][i] = value
        self._observe(i, observation, info, ended=terminated or truncated)

    def _write_together(self, ids: Ints, results: list[Any]) -> bool:
        """Check the results of a step of envs ``ids`` and write all but the states, much faster than one by one.

        Return False, and write nothing, if their types are not the usual ones.
        """
        try:
            observations, *numbers, infos = zip(*results, strict=True)
            found = dict(zip(("reward", "terminated", "truncated"), map(np.array, numbers), strict=True))
            if self.source.success is not None:
                found["success"] = np.array([info.get(self.source.success, False) for info in infos])
            states = {(observation.shape, observation.dtype.kind) for observation in observations}
        except (ValueError, TypeError, AttributeError):  # shapes differ, or something is no array or no dictionary
            return False
        usual = set(map(type, infos)) == {dict} and states <= self.usual_states
        for key, values in found.items():
            kinds = NUMBERS if key == "reward" else "b"
            usual = usual and values.shape == ids.shape and values.dtype.kind in kinds
        if usual:
            for key, values in found.items():
                self.arrays[key][ids] = values
        return usual

    def _observe(self, i: int, observation: Any, info: Any, ended: bool) -> None:
        """Write the observation of env ``i``."""
        for leaf, where in self.parts:
            leaf.encode(leaf.value(observation), self.arrays["state"][i, where])
        for leaf, shots in self.images:
            image = leaf.value(observation)[None]
            for frame, images in shots:
                frame.write(image, images[i : i + 1])
        if self.rendered is not None:
            self.rendered[i] = resized(self._frame(i), *self.rendered.shape[2:0:-1])
        if self.source.has_mask:
            self.write_mask(i, None if ended else mask_of(self.envs[i], info))  # an episode that ended allows all
