"""Checks of what environments of others do: type and shape of what they return, where it enters.

A number is never made from a text, a complex number or an array of one number, and nothing is broadcast. Imports
neither torch nor other modules of ``envs``, because the processes of ``processes`` need it.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

NUMBERS = "biuf"  # kinds of numpy's types: booleans, integers and real numbers
INTEGERS = "biu"

Single = TypeVar("Single", float, bool)
_exit = os._exit
_here = threading.local()  # .process: the process in which this thread runs code of an environment; 0: none


def _leave(status: int) -> NoReturn:
    """Stand for ``os._exit``, which would end a run without a word, and with the exit code of a finished one."""
    if getattr(_here, "process", 0) == os.getpid():
        raise SystemExit(f"os._exit({status})")
    _exit(status)


@contextmanager
def staying() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit in this thread, but not in a process that it forks."""
    os._exit = _leave  # for good, because other threads may be inside, too
    _here.process = os.getpid()
    try:
        yield
    finally:
        _here.process = 0


class WrongResult(ValueError):
    """What an environment returned cannot be used. The message continues the name of the environment."""


def array_of(value: Any, shape: Sequence[int], kinds: str, what: str) -> NDArray[Any]:
    """Return a value as an array. WrongResult unless it has this shape and a type of these ``kinds``."""
    array = value if type(value) is np.ndarray else _array(value)
    if array.shape != shape or array.dtype.kind not in kinds:
        wanted = "integers" if kinds == INTEGERS else "real numbers"
        raise WrongResult(f"returned {what} as {_type(value)}, needed {wanted} of shape {list(shape)}")
    return array


def _array(value: Any) -> NDArray[Any]:
    """Return a value as an array; one of objects if its parts have different shapes."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        return np.array(None)


def _type(value: Any) -> str:
    array = _array(value)
    if array.dtype == object or isinstance(value, str):
        return repr(value) if value is None or isinstance(value, str) else type(value).__name__
    return f"{array.dtype.name} {list(array.shape)}"


def single(value: Any, name: str, kind: type[Single]) -> Single:
    """Return a real number, or a truth value, which 0 and 1 are, too. WrongResult for anything else."""
    if type(value) is kind:  # of most environments
        return value
    array = _array(value)
    is_number = array.dtype.kind in NUMBERS
    if array.ndim or not is_number or (kind is bool and array not in (0, 1)):
        needed = "a number" if kind is float else "True or False"
        item = f"{name}.item()" if array.size == 1 and is_number else name
        raise WrongResult(f"returned {name} as {_type(value)}, needed {needed}: return {kind.__name__}({item})")
    return kind(array)


def truths(values: Any, num: int, what: str) -> NDArray[np.bool_]:
    """Return truth values [num]; 0 and 1 are, too. WrongResult for anything else."""
    array = array_of(values, (num,), NUMBERS, what)
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise WrongResult(f"returned {what} with other values than True and False")
    return array.astype(np.bool_)


def info_of(info: Any) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        cure = "return {} if there is nothing to say"
        raise WrongResult(f"returned info as {_type(info)}, needed a dictionary: {cure}")
    return info


def step_of(result: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """Return what ``step`` gave, of which the observation is still to be checked. WrongResult if not as needed."""
    what = "must return observation, reward, terminated, truncated and info from step()"
    observation, reward, terminated, truncated, info = _unpacked(result, 5, what)
    ends = single(terminated, "terminated", bool), single(truncated, "truncated", bool)
    return observation, single(reward, "reward", float), *ends, info_of(info)


def reset_of(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return what ``reset`` gave, of which the observation is still to be checked. WrongResult if not as needed."""
    observation, info = _unpacked(result, 2, "must return an observation and an info from reset()")
    return observation, info_of(info)


def _unpacked(result: Any, count: int, what: str) -> Any:
    if not isinstance(result, tuple) or len(result) != count:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise WrongResult(f"{what}, got {got}")
    return result


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
    parts = [np.ravel(part) for part in (mask if isinstance(mask, (tuple, list)) else [mask])]
    return np.concatenate([truths(part, part.size, "action_mask") for part in parts])


def advice(error: BaseException, built_in: int | None = None) -> str:
    """Return the end of a message about an exception that an environment raised: the option that cures it, if any.

    built_in: id of the thread that built the environment.
    """
    here = threading.current_thread()
    moved = here is not threading.main_thread() or built_in not in (None, here.ident)
    if moved and "thread" in str(error).lower():
        return "; sim.processes=1 builds and steps it in the main thread of a process of its own"
    if type(error).__module__.partition(".")[0] in ("mujoco", "glfw", "OpenGL") or "GLFW" in str(error):
        return "; without a display set the variable MUJOCO_GL=egl, or MUJOCO_GL=osmesa, which draws on the CPU"
    return ""
