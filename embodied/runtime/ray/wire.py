"""Tensors in Ray's messages: as numpy arrays, whose bytes the object store shares between processes without a copy.

A tensor that was received shares the object's memory: read it, and clone it before anything is written in place.
"""

import asyncio
import warnings
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import ray.util
import torch
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from torch import Tensor

from embodied.core.errors import UserError
from embodied.runtime.ray.collective import PeerLost

T = TypeVar("T")
Packed = tuple[np.ndarray[Any, Any], str]
"""Array, and the name of the tensor's dtype."""

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def share_tensors() -> None:
    """Let this process send tensors of every device so; any process can receive them."""
    ray.util.register_serializer(Tensor, serializer=pack, deserializer=unpack)


def pack(tensor: Tensor) -> Packed:
    """Return a tensor's values on the CPU."""
    values = tensor.detach().cpu().contiguous()
    name = str(values.dtype).removeprefix("torch.")
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy(), name


def unpack(packed: Packed) -> Tensor:
    """Return the tensor of an array, without a copy."""
    array, name = packed
    dtype: torch.dtype = getattr(torch, name)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def nbytes(value: Any) -> int:
    """Return the bytes of all tensors in a tensor, mapping, sequence or dataclass; other values count nothing."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return sum(nbytes(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0


def own_cause(error: BaseException) -> BaseException:
    """Return what a part raised: a UserError itself, anything else with the traceback of its process."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, UserError) else error.as_instanceof_cause()
    return error


def is_fault(error: BaseException | None) -> bool:
    """Return whether a process, one that it works with or its cluster failed, and not the code that ran there."""
    return isinstance(error.cause if isinstance(error, RayTaskError) else error, RayError | PeerLost)


def value_of(future: Future[T]) -> T:
    """Return the result of a finished call, or raise ``own_cause`` of its error."""
    error = future.exception()
    if error is not None:
        raise own_cause(error)
    return future.result()


async def fetch(references: Sequence[Awaitable[T]]) -> list[T]:
    """Return the objects, in order, without those that no node has any more. ObjectLostError if that leaves none."""
    found = await asyncio.gather(*references, return_exceptions=True)
    kept = [value for value in found if not isinstance(value, BaseException)]
    for error in found:
        if isinstance(error, BaseException) and (not kept or not isinstance(error, ObjectLostError)):
            raise error
    return kept
