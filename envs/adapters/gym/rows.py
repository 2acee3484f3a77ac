"""Environments of gymnasium as the rows of a batch of arrays, stepped one after the other or all together.

    start(ids, seeds) ─► reset ─┐
    step(ids)         ─► step   ├─► arrays: state, images, action_mask, reward, terminated, truncated, ...
    render(w, h)      ─► render ┘   or images [N, h, w, 3]

What an environment returns is checked here, once (``results``). The arrays may lie in memory that processes share, so
this imports neither torch nor modules of ``envs`` that do.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from embodied.core.errors import UserError, describe_error
from embodied.envs.adapters.gym import results as checked
from embodied.envs.adapters.gym.source import Source, class_of, close
from embodied.envs.adapters.gym.spaces import RENDER, ActionCodec, Leaf, Pixels, leaves_of, resized, shown

Ints = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


class EncodedRows(ABC):
    """The way of observations into arrays, and errors. Subclasses build the environments and step them."""

    def __init__(self, source: Source, arrays: Arrays, observation: Any, action: Any) -> None:
        """observation, action: spaces of one environment. arrays: results [N, ...], and actions of the next step."""
        self.source, self.arrays, self.codec = source, arrays, ActionCodec(action)
        self.thread = threading.get_ident()  # that builds the environments
        wanted = {key.removeprefix("images."): array for key, array in arrays.items() if key.startswith("images.")}
        self.rendered = wanted.get(RENDER)
        self.parts: list[tuple[Leaf, slice]] = []
        self.images: list[tuple[Leaf, list[tuple[Any, Pixels]]]] = []
        begin = 0
        for leaf in leaves_of(observation):
            if leaf.frames:
                shots = [(frame, wanted[name]) for name, frame in leaf.frames.items() if name in wanted]
                self.images += [(leaf, shots)] if shots else []
            else:
                self.parts.append((leaf, slice(begin, begin + leaf.size)))
                begin += leaf.size
        self.seed_N, self.step_N = np.zeros((2, len(arrays["reward"])), np.int64)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn whatever code of an environment raises in the block into UserError; ``os._exit`` raises, too."""
        with checked.staying():
            try:
                yield
            except (Exception, SystemExit) as error:  # an environment of others may raise anything
                raise self.failure(error) from error

    @abstractmethod
    def failure(self, error: BaseException) -> UserError:
        """Return the error for what an environment has raised or returned."""

    def write_observations(self, rows: slice | Ints, value: Callable[[Leaf], NDArray[Any]]) -> None:
        """Write state and images of envs ``rows``. value: returns their part of the observation, [n, ...]."""
        for leaf, where in self.parts:
            self.arrays["state"][rows, where] = leaf.encoded(value(leaf))
        for leaf, shots in self.images:
            image = value(leaf)
            for frame, images in shots:
                images[rows] = frame.pixels(image, *images.shape[1:3])

    def write_mask(self, i: int, mask: NDArray[np.bool_] | None) -> None:
        """Write the allowed choices of env ``i``, all without a mask. WrongResult if there is none."""
        row = self.arrays["action_mask"][i]
        row[:] = True
        if mask is None:
            return
        if mask.shape != row.shape:
            raise checked.WrongResult(f"returned action_mask of shape {list(mask.shape)}, needed {list(row.shape)}")
        row[:] = mask
        if not all(part.any() for part in np.split(mask, np.cumsum(self.codec.counts)[:-1])):
            raise checked.WrongResult("returned action_mask that allows no choice, and the episode has not ended")

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
        self.envs = {i: source.build(render) for i in ids}
        self.at = ids[0]  # env whose code runs, or ran last
        first = self.envs[self.at]
        super().__init__(source, arrays, first.observation_space, first.action_space)
        is_vector = isinstance(first.observation_space, Box) and len(first.observation_space.shape) == 1
        self.is_state = is_vector and bool(self.parts) and self.rendered is None and not source.has_mask
        """Whether an observation is the state as it is, which saves time."""

    def start(self, ids: Ints, seeds: Ints) -> None:
        self.seed_N[ids], self.step_N[ids] = seeds, 0
        with self.guarded():
            for self.at, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
                observation, info = checked.reset_of(self.envs[self.at].reset(seed=seed))
                self._observe(self.at, observation, info, ended=False)
        self.check_finite(ids)

    def step(self, ids: Ints) -> None:
        """Make a control step of envs ``ids`` with ``arrays["action"]``."""
        self.step_N[ids] += 1
        results: list[Any] = []
        states: list[bytes] = []
        rows = ids.tolist()
        with self.guarded():
            for i, action in zip(rows, self.codec.decode(self.arrays["action"][ids]), strict=True):
                self.at = i
                result = self.envs[i].step(action)
                if not self.is_state:
                    self._write(i, result)
                    continue
                results.append(result)
                try:
                    states.append(result[0].tobytes())  # at once, because the next env may use the same array
                except (AttributeError, TypeError, LookupError):
                    states.append(b"")  # ``_write`` says what is wrong with it
            if results and not self._write_together(ids, results, states):
                for self.at, result in zip(rows, results, strict=True):
                    self._write(self.at, result)
        self.check_finite(ids)

    def render(self, width: int, height: int) -> Pixels:
        frames = []
        with self.guarded():
            for i in self.envs:
                self.at = i
                frames.append(resized(self._frame(i), width, height))
        return np.stack(frames)

    def close(self) -> None:
        for env in self.envs.values():
            close(env)
        self.envs = {}

    def failure(self, error: BaseException) -> UserError:
        if isinstance(error, checked.WrongResult):
            return self.error(self.at, f"of {class_of(self.envs[self.at])} {error}")
        return self.error(self.at, f"raised {describe_error(error)}", checked.advice(error, self.thread))

    def _frame(self, i: int) -> Pixels:
        """Return what env ``i`` shows people, bytes [H, W, 1 or 3]. WrongResult if that is no image."""
        if type(self.envs[i].unwrapped).render is gymnasium.Env.render:
            raise checked.WrongResult("has no render(), although its metadata name the render mode rgb_array")
        return shown(self.envs[i].render())

    def _write(self, i: int, result: Any) -> None:
        observation, reward, terminated, truncated, info = checked.step_of(result)
        found: dict[str, Any] = {"reward": reward, "terminated": terminated, "truncated": truncated}
        if self.source.success is not None:
            success = info.get(self.source.success, False)
            found["success"] = checked.single(success, f"info['{self.source.success}']", bool)
        for key, value in found.items():
            self.arrays[key][i] = value
        self._observe(i, observation, info, ended=terminated or truncated)

    def _write_together(self, ids: Ints, results: list[Any], states: list[bytes]) -> bool:
        """Check and write the results of a step at once, which is fast; return False if types are not the usual."""
        try:
            observations, *numbers, infos = zip(*results, strict=True)
            found = dict(zip(("reward", "terminated", "truncated"), map(np.array, numbers), strict=True))
            if self.source.success is not None:
                found["success"] = np.array([info.get(self.source.success, False) for info in infos])
            (kind,), (dtype,) = set(map(type, observations)), {observation.dtype for observation in observations}
            shapes = {observation.shape for observation in observations}
        except (ValueError, TypeError, AttributeError):  # types differ, or something is no array or no dictionary
            return False
        usual = kind is np.ndarray and dtype.kind in checked.NUMBERS and shapes == {self.arrays["state"].shape[1:]}
        usual = usual and set(map(type, infos)) == {dict}
        for key, values in found.items():
            kinds = checked.NUMBERS if key == "reward" else "b"
            usual = usual and values.shape == ids.shape and values.dtype.kind in kinds
        if usual:
            found["state"] = np.frombuffer(b"".join(states), dtype).reshape(len(ids), -1)
            rows = slice(None) if len(ids) == len(self.seed_N) else ids
            for key, values in found.items():
                self.arrays[key][rows] = values
        return usual

    def _observe(self, i: int, observation: Any, info: Any, ended: bool) -> None:
        self.write_observations(slice(i, i + 1), lambda leaf: leaf.value(observation)[None])
        if self.rendered is not None:
            self.rendered[i] = resized(self._frame(i), *self.rendered.shape[2:0:-1])
        if self.source.has_mask:
            mask = None if ended else checked.mask_of(self.envs[i], info)  # an episode that ended allows all
            self.write_mask(i, mask)


class VectorRows(EncodedRows):
    """Rows of the vector environment of a registration, with the methods of ``LocalRows``. UserError as there.

    It must leave resets to us (``AutoresetMode.DISABLED``), so that every episode begins where its plan says.
    """

    def __init__(self, source: Source, arrays: Arrays, render: bool) -> None:
        self.env = source.build_vector(len(arrays["reward"]), render)
        super().__init__(source, arrays, self.env.single_observation_space, self.env.single_action_space)
        self.over_N = np.zeros(len(self.seed_N), np.bool_)  # the environment itself has ended the episode

    def start(self, ids: Ints, seeds: Ints) -> None:
        self.seed_N[ids], self.step_N[ids] = seeds, 0
        given = dict(zip(ids.tolist(), seeds.tolist(), strict=True))
        with self.guarded():
            self._observe(ids, *self._reset(ids, [given.get(i) for i in range(len(self.seed_N))]))
        self.check_finite(ids)

    def step(self, ids: Ints) -> None:
        self.step_N[ids] += 1
        others_N = self.over_N.copy()
        others_N[ids] = False
        with self.guarded():
            if others_N.any():  # it cannot step these, and nobody reads them before ``start``
                self._reset(np.flatnonzero(others_N), None)
            actions = self.codec.decode(self.arrays["action"])
            observations, reward_N, terminated_N, truncated_N, infos = self.env.step(actions)
            num = len(self.seed_N)
            results = {
                "reward": checked.array_of(reward_N, (num,), checked.NUMBERS, "rewards"),
                "terminated": checked.truths(terminated_N, num, "terminated"),
                "truncated": checked.truths(truncated_N, num, "truncated"),
            }
            self.over_N = results["terminated"] | results["truncated"]
            if self.source.success is not None:
                success = checked.info_of(infos).get(self.source.success, np.zeros(num, np.bool_))
                results["success"] = checked.truths(success, num, f"infos['{self.source.success}']")
            for key, values in results.items():
                self.arrays[key][ids] = values[ids]
            self._observe(ids, observations, checked.info_of(infos))
        self.check_finite(ids)

    def render(self, width: int, height: int) -> Pixels:
        with self.guarded():
            return np.stack([resized(shown(frame), width, height) for frame in self._frames()])

    def close(self) -> None:
        close(self.env)

    def failure(self, error: BaseException) -> UserError:  # nobody knows of which environment
        what = f"{error}" if isinstance(error, checked.WrongResult) else f"raised {describe_error(error)}"
        when = f"(after {self.step_N.max()} control steps){checked.advice(error, self.thread)}"
        return UserError(f"task {self.source.name}: its vector environment {what} {when}")

    def _reset(self, ids: Ints, seeds: list[int | None] | None) -> tuple[Any, Mapping[str, Any]]:
        mask_N = np.zeros(len(self.seed_N), np.bool_)
        mask_N[ids] = True
        self.over_N[ids] = False
        given: Any = seeds  # gymnasium's types know no None in the list
        return self.env.reset(seed=given, options=None if mask_N.all() else {"reset_mask": mask_N})

    def _frames(self) -> Any:
        """Return what every env shows people. WrongResult if there is no image for each."""
        frames = self.env.render()
        if frames is None or len(frames) != self.env.num_envs:
            raise checked.WrongResult(f"gave no image of each of {self.env.num_envs} environments from render()")
        return frames

    def _observe(self, ids: Ints, observations: Any, infos: Mapping[str, Any]) -> None:
        self.write_observations(ids, lambda leaf: leaf.value(observations, len(self.seed_N))[ids])
        if self.rendered is not None:
            frames = self._frames()
            for i in ids.tolist():
                self.rendered[i] = resized(shown(frames[i]), *self.rendered.shape[2:0:-1])
        if self.source.has_mask:
            masks: Any = infos.get("action_mask")
            told_N = np.zeros(len(self.seed_N), np.bool_) if masks is None else infos.get("_action_mask", ~self.over_N)
            for i in ids.tolist():
                known = masks is not None and told_N[i] and not self.over_N[i]
                self.write_mask(i, checked.flat_mask(masks[i]) if known else None)
