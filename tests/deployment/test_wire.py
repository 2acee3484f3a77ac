"""Messages: what openpi's clients write is read, everything else is refused by one error and costs little."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest

from embodied.core.errors import UserError
from embodied.deployment.serving.protocol import MAX_TEXT_BYTES, decode, encode

LIMIT = 2**20


def array(**changes: Any) -> dict[bytes, Any]:
    """A packed array of two numbers, with changes; None drops a key."""
    found = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    found |= {key.encode(): value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


MESSAGE = {
    "observation/state": np.linspace(-1, 1, 40, dtype=np.float32),
    "observation/images/front": np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3),
    "noise": np.zeros((4, 4)), "scalar": np.array(2.5), "empty": np.zeros((0, 3), np.float32),
    "flags": np.array([True, False]), "big": np.array([1, 2], ">i4"), "prompt": "lift it", "number": np.float32(0.5),
    "index": np.int64(-7), "yes": np.bool_(True), "plain": [1, -1, 2**40, 1.5, None, True, "ä"], "bytes": b"\x00\x01",
}  # fmt: skip


def test_a_message_comes_back_as_it_was() -> None:
    found = decode(encode(MESSAGE), LIMIT)
    assert list(found) == list(MESSAGE)
    for key, value in MESSAGE.items():
        if isinstance(value, (np.ndarray, np.generic)):
            assert type(found[key]) is type(value)
            assert found[key].dtype == value.dtype
            np.testing.assert_array_equal(found[key], value)
        else:
            assert found[key] == value


def test_an_array_that_is_not_contiguous_is_packed_in_order() -> None:
    value = np.arange(12.0).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(decode(encode(value), LIMIT), value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "incomplete input"),
        (b"\x81\xa1", "incomplete input"),
        (b"\xdd\xff\xff\xff\xff\xc0", "exceeds max_array_len"),
        (b"\xc6\xff\xff\xff\xff\x00", "incomplete input|exceeds max_bin_len"),
        (b"\xdf\xff\xff\xff\xff" + bytes(2000), "exceeds max_map_len"),
        (b"\x00\x00", "extra data"),
        (b"\xdb" + (MAX_TEXT_BYTES + 1).to_bytes(4, "big") + b"a" * (MAX_TEXT_BYTES + 1), "exceeds max_str_len"),
        (b"\x91" * 100_000 + b"\xc0", "StackError"),
        (b"\xdc\x50\x00" + b"\xc0" * 20480, "exceeds max_array_len"),
        (b"\xc1", "FormatError"),
        (b"\xd4\x00\x00", "exceeds max_ext_len"),
        (b"\xd6\xff" + bytes(4), "exceeds max_ext_len"),  # a timestamp
        (b"\xa2\xff\xfe", "utf-8"),
        (b"\x81\x01\x02", "not allowed for map key"),
        (b"\x81\x90\x02", "not allowed for map key"),
        (bytes(LIMIT + 1), "got 1048577 bytes, allowed: at most 1048576"),
        (array(dtype="|O"), r"got dtype '\|O', allowed: <f2"),
        (array(dtype="<c8"), "got dtype"),
        (array(dtype="<M8[s]"), "got dtype"),
        (array(dtype="<U2"), "got dtype"),
        (array(dtype="V8"), "got dtype"),
        (array(dtype="f4,f4"), "got dtype"),
        (array(dtype="(1000000000,)f4"), "got dtype"),
        (array(dtype=[["a", "<f4"]]), "got dtype"),
        (array(dtype=None), "dtype, shape and data"),
        (array(more=1), "dtype, shape and data"),
        (array(shape=[3]), r"got shape \[3\] of float32 for 8 bytes"),
        (array(shape=[-2]), "got shape"),
        (array(shape=[-1, -2]), "got shape"),
        (array(shape=[2.0]), "got shape"),
        (array(shape=[True, 2]), "got shape"),
        (array(shape=[2**62, 4]), "got shape"),
        (array(shape=[1] * 9), "at most 8 sizes"),
        (array(shape=2), "at most 8 sizes"),
        (array(data="a" * 8), "an array has bytes"),
        (array(data=b"", shape=[0] + [2**24] * 7), "too big"),
        ({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}, "a number has"),
        ({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}, "out of bounds"),
        ({b"__npgeneric__": True, b"data": float("nan"), b"dtype": "<i8"}, "NaN"),
        ({b"__npgeneric__": True, b"data": 1, b"dtype": "O"}, "got dtype"),
    ],
)
def test_a_malformed_message_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decode(data if isinstance(data, bytes) else msgpack.packb(data), LIMIT)


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["a"]), np.array([1j]), object(), {1, 2}])
def test_only_numbers_are_packed(value: Any) -> None:
    with pytest.raises(UserError, match="allowed: "):
        encode({"x": value})


def test_a_hostile_message_costs_little_memory() -> None:
    deep = b"\xdc\x10\x00" * (LIMIT // 3)  # lists that claim 4,096 values each
    many = msgpack.packb([[[]] * 4000] * 200)  # within every other limit
    claims = b"\xdd\x0f\xff\xff\xff" * (LIMIT // 5)  # lists that claim a quarter of a billion values each
    wide = b"\xdd" + (LIMIT - 5).to_bytes(4, "big") + b"\x90" * (LIMIT - 5)
    maps = b"\xdf" + (LIMIT // 8).to_bytes(4, "big") + b"\xa1a\x80" * (LIMIT // 4)
    tracemalloc.start()
    try:
        for data in (
            deep,
            many,
            claims,
            wide,
            maps,
            b"\xc6\x7f\xff\xff\xff",
            msgpack.packb(array(shape=[2**30, 2**30])),
        ):
            tracemalloc.reset_peak()
            with pytest.raises(UserError):
                decode(data, LIMIT)
            assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def damaged(messages: list[bytes], draw: random.Random) -> bytes:
    """A message with bytes changed, dropped, repeated or added, or random bytes."""
    kind, data = draw.randrange(8), bytearray(draw.choice(messages))
    if kind == 0:
        return draw.randbytes(draw.randrange(64))
    if kind == 1:
        return bytes(data[: draw.randrange(len(data))])
    if kind == 2:
        other, at = draw.choice(messages), draw.randrange(len(data))
        return bytes(data[:at] + other[draw.randrange(len(other)) :])
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(data))
        if kind == 3:
            del data[at]
        elif kind == 4:
            data[at:at] = data[at : at + draw.randrange(1, 16)]
        else:
            data[at] = draw.choice((draw.randrange(256), 0xC1 + draw.randrange(31), 0xFF, 0x80, 0x90))
    return bytes(data)


def fuzz(count: int) -> int:
    """Decode damaged messages; return how many were refused."""
    draw = random.Random(0)
    messages = [encode({key: value}) for key, value in MESSAGE.items()]
    messages += [encode(array()), encode([array(), 1.5, {"a": None}])]
    refused = 0
    for _ in range(count):
        try:
            decode(damaged(messages, draw), LIMIT)
        except UserError:
            refused += 1
    return refused


@pytest.mark.parametrize(
    "count",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow(reason="a million messages"), pytest.mark.timeout(900)])],
)
def test_a_damaged_message_never_fails_otherwise(count: int) -> None:
    assert 0.3 * count < fuzz(count) < count


def test_damaged_messages_cost_little_memory() -> None:
    tracemalloc.start()
    try:
        fuzz(2000)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
