"""Tampered bundles: whatever somebody changed, with or without its hash, ends in one line, in bounded memory.

The cases are made from a bundle of a small flow policy: every entry of ``bundle.json`` and every file is changed in
every way that fits it.
"""

from __future__ import annotations

import copy
import io
import json
import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from embodied import deploy, serve
from embodied.core.errors import UserError
from embodied.core.user_files import sha256
from embodied.deployment.bundle import runner
from embodied.deployment.bundle.description import PARITY_FILE, POLICY_FILE, SIMULATION_FILE, Bundle
from embodied.deployment.bundle.format import BUNDLE_FILE, RANGES, read_bundle
from embodied.deployment.bundle.runner import OUTPUT_PREFIX
from tests.commands.helpers import run
from tests.deployment.builders import SEES_AND_READS, make_bundle

GIB = 2**30
MAX_LETTERS = 1500


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Let the process have one GiB more of address space than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + GIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def problem(path: Path, command: Any = deploy) -> str | None:
    """What is wrong with the way in which a command refuses a bundle; None if nothing is."""
    outcome = run(command.main, [f"bundle={path}", *([] if command is serve else ["robot=sim", "lockstep=true"])])
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    last = outcome.stderr.splitlines()[-1:]
    if outcome.code != 2 or outcome.stdout or errors != last or "Traceback" in outcome.stderr:
        return f"code {outcome.code}: {outcome.stderr[-300:]}"
    return wrong_message(last[0])


def wrong_message(text: str) -> str | None:
    """What is wrong with the message of a refused bundle; None if nothing is."""
    short = len(text) <= MAX_LETTERS and text.isprintable() and "llocate" not in text  # no MemoryError
    return None if short else f"message: {text!r:.300}"


def rehash(path: Path) -> None:
    """Write the hashes of a bundle's files, as they are now, into its description."""
    content = json.loads((path / BUNDLE_FILE).read_text())
    content["files"] = {name: sha256(path / name) for name in content["files"] if (path / name).is_file()}
    (path / BUNDLE_FILE).write_text(json.dumps(content))


# -- bundle.json -------------------------------------------------------------------------------------------------------
def entries(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys of every entry below a JSON value; of a list, those of its first one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        if isinstance(value, list) and key != 0:
            continue
        yield (*keys, key)
        yield from entries(child, (*keys, key))


def changes(value: Any) -> Iterator[Any]:
    """Values in place of one of ``bundle.json``, none of which is right."""
    yield from (object, float("nan"), float("inf"), 10**400, -1e300)  # object: without the entry
    if not isinstance(value, bool):
        yield True
    if isinstance(value, str):
        yield from (1, None, [value], "\x1b[31mred\x1b[0m", "x" * 100_000)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from ("1", 1e300, [value])
    elif isinstance(value, list):
        yield from ("text", {}, [*value, object()], [value] * 2, [None] * 5000)
    elif isinstance(value, dict):
        yield from ([], "text", value | {"other": 1}, value | {"\x1b[31m": 1})


FREE = ("notes", "instructions", "noise_shape")
"""Lists that may have another length, as far as the description alone says."""


def changed(content: Any, keys: tuple[Any, ...], value: Any) -> str:
    """JSON of ``content`` with another value at ``keys``; ``object`` removes it."""
    content = copy.deepcopy(content)
    parent = content
    for key in keys[:-1]:
        parent = parent[key]
    if value is object:
        del parent[keys[-1]]
    else:
        parent[keys[-1]] = value
    return json.dumps(content, default=lambda _: "?")


def test_every_change_of_the_description_is_refused(bundle_dir: Path) -> None:
    original, found = json.loads((bundle_dir / BUNDLE_FILE).read_text()), []
    for keys in entries(original):
        value = original
        for key in keys:
            value = value[key]
        for other in changes(value):
            if keys[0] in FREE and len(keys) <= 2 and (other is object or isinstance(other, list)):
                continue
            (bundle_dir / BUNDLE_FILE).write_text(changed(original, keys, other))
            try:
                read_bundle(bundle_dir)
                wrong: str | None = "it was accepted"
            except UserError as error:
                wrong = wrong_message(str(error))
            if wrong:
                found.append(f"{'.'.join(map(str, keys))} = {other!r:.40}: {wrong}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("arm", "joints", 0, "stiffness"), -1000.0, "arm.joints[0].stiffness: got -1000, allowed: 0.001 to 1e+06"),
        (("arm", "joints", 0, "stiffness"), 1.0, "arm.joints[0]: damping / stiffness is 100 s, allowed: 1"),
        (("arm", "joints", 3, "max_velocity"), 1000.0, "arm.joints[3].max_velocity: got 1000, allowed: 0.001 to 20"),
        (("arm", "joints", 0, "low"), 3.0, "arm.joints[0]: low 3 is not below high 2.8973"),
        (("arm", "joints", 0, "home"), 3.0, "arm.joints[0]: home 3 is outside of low to high"),
        (("arm", "joints", 1, "name"), "joint1", "arm.joints: a name is twice or blank"),
        (("arm", "joints", 0, "axis"), [0.0, 0.0, 0.0], "arm.joints[0].axis: its length is 0, needed 1"),
        (("arm", "workspace_high_m"), [0.1, 0.35, 0.45], "arm.workspace: low 0.25 is not below high 0.1"),
        (("arm", "gripper", "open_m"), 0.9, "arm.gripper: open, closed and largest do not fit"),
        (("arm", "rotation"), True, "action: has 4 entries, the arm's control needs 5"),
        (("action", 0, "scale"), 0.0, "action: a scale is 0, allowed: above 0"),
        (("action", 3, "scale"), 0.5, "action: gripper is -0.485 to 0.515 m, the gripper's -0.01 to 0.04 m"),
        (("horizon",), 10**9, "horizon: got 1e+09, allowed: 1 to 10000"),
        (("horizon",), 5, "the policy planned float32 [64, 4, 4], needed float32 [64, 5, 4]"),
        (("execute",), 5, "execute: got 5, allowed: at most horizon 4"),
        (("noise_shape",), [100_000, 100_000], "noise_shape: got [100000, 100000], allowed: at most 1048576 numbers"),
        (("noise_shape",), [4, 5], "needed float32 ['N', 4, 5]"),
        (("max_delay",), 2, "policy.onnx takes ['noise', 'state']"),
        (("state_range", 0, "high"), 400.0, "to 400 is outside of joint1's limits"),
        (("state_range", 0, "name"), "other", "state_range: has 40 entries, needed those of state, 40, in order"),
        (("state", 0, "size"), 6, "state: joint_pos has 6 entries, the arm needs 7"),
        (("state", 7, "difference", "of"), "ball", "state: cube_from_tcp is a difference of 'ball', which is no term"),
        (("files", "policy.onnx.data"), "0" * 64, "files: got 'policy.onnx.data', which no bundle of this layout has"),
        (("parity_tolerance",), 1e9, "parity_tolerance: got 1e+09, allowed: 0 to 0.001"),
    ],
)
def test_numbers_that_no_arm_has_and_sizes_that_do_not_fit_are_named(
    bundle_dir: Path, keys: tuple[Any, ...], value: Any, message: str
) -> None:
    original = json.loads((bundle_dir / BUNDLE_FILE).read_text())
    (bundle_dir / BUNDLE_FILE).write_text(changed(original, keys, value))
    outcome = run(deploy.main, [f"bundle={bundle_dir}", "robot=sim"])
    assert (outcome.code, message in outcome.stderr) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", "[" * 100_000, '{"format": 2}', "\ufeff{}", "9" * 100_000, '{"a":' * 9000]
)
def test_what_is_no_description_is_refused(bundle_dir: Path, text: str) -> None:
    (bundle_dir / BUNDLE_FILE).write_text(text, encoding="utf-8")
    assert problem(bundle_dir) is None
    assert problem(bundle_dir, serve) is None


def test_all_numbers_of_a_description_have_a_range(tmp_path: Path) -> None:
    """``parse_bundle`` looks up each number; this bundle has all kinds of entries."""
    make_bundle(tmp_path / "bundle", **SEES_AND_READS)
    assert isinstance(read_bundle(tmp_path / "bundle"), Bundle)
    assert all(low < high or name == "history" for name, (low, high) in RANGES.items())


# -- files -------------------------------------------------------------------------------------------------------------
def test_changed_missing_and_further_files_are_refused(bundle_dir: Path, tmp_path: Path) -> None:
    names = [path.name for path in bundle_dir.iterdir() if path.name != BUNDLE_FILE]
    for name in names:
        original = (bundle_dir / name).read_bytes()
        for content in (b"", original[: len(original) // 2], original + b"\0", original[::-1]):
            (bundle_dir / name).write_bytes(content)
            assert problem(bundle_dir) is None, name
        (bundle_dir / name).unlink()
        assert problem(bundle_dir) is None, name
        (bundle_dir / name).mkdir()
        assert problem(bundle_dir) is None, name
        (bundle_dir / name).rmdir()
        os.mkfifo(bundle_dir / name)
        assert problem(bundle_dir) is None, name
        (bundle_dir / name).unlink()
        (bundle_dir / name).write_bytes(original)
    for name in ("policy.onnx.data", "tokenizer.json", ".architecture", "modeling.py", "\x1b[31mred"):
        (bundle_dir / name).write_bytes(b"1")
        assert problem(bundle_dir) is None, name
        (bundle_dir / name).unlink()
    assert read_bundle(bundle_dir).horizon == 4


def npz(**arrays: Any) -> bytes:
    """An .npz file; bytes stand for an array's file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in arrays.items():
            if not isinstance(value, bytes):
                file = io.BytesIO()
                np.save(file, value)
                value = file.getvalue()
            archive.writestr(f"{name}.npy", value)
    return buffer.getvalue()


def npy(shape: str, descr: str = "'<f4'", version: bytes = b"\x01\x00") -> bytes:
    """The header of an array, and four numbers."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


OUTPUT = f"{OUTPUT_PREFIX}actions"


def parities() -> Iterator[Callable[[dict[str, Any]], bytes]]:
    """Ways to make another parity.npz of the arrays of one."""
    yield lambda _: b""
    yield lambda _: b"PK\x03\x04" + bytes(100)
    yield lambda a: npz(**a)[:-30]
    yield lambda a: npz(**a | {"state": a["state"].astype(object)})
    yield lambda a: npz(**a | {"state": npy("(4000000000000,)")})
    yield lambda a: npz(**a | {"state": npy("(-4,)")})
    yield lambda a: npz(**a | {"state": npy("(4,)", "'|O'")})
    yield lambda a: npz(**a | {"state": npy("(4,)", "[('a', '<f4')]")})
    yield lambda a: npz(**a | {"state": npy("(4,)", version=b"\x02\x00")})
    yield lambda a: npz(**a | {"state": npy("(" * 60 + ")" * 60)})
    yield lambda a: npz(**a | {"state": np.zeros((2**19,), np.float32)})  # few bytes in the file
    yield lambda a: npz(**a | {"state": a["state"][:, :-1]})
    yield lambda a: npz(**a | {"state": a["state"].astype(np.float64)})
    yield lambda a: npz(**a | {"state": np.full_like(a["state"], np.nan)})
    yield lambda a: npz(**{name: value for name, value in a.items() if name != OUTPUT})
    yield lambda a: npz(**{name: value for name, value in a.items() if name != "noise"})
    yield lambda a: npz(**a | {"other": a["noise"]})
    yield lambda a: npz(**a | {OUTPUT: a[OUTPUT][:, :-1]})
    yield lambda a: npz(**a | {OUTPUT: a[OUTPUT] + np.float32(1e-5)})
    yield lambda a: npz(**a | {OUTPUT: np.full_like(a[OUTPUT], np.nan)})
    yield lambda a: npz(**{name: value[:0] for name, value in a.items()})


@pytest.mark.parametrize("make", list(parities()))
def test_recordings_that_are_none_of_the_policy_are_refused(
    bundle_dir: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_PARITY_BYTES", 2**20)
    with np.load(bundle_dir / PARITY_FILE) as file:
        arrays = dict(file)
    (bundle_dir / PARITY_FILE).write_bytes(make(arrays))
    rehash(bundle_dir)
    assert problem(bundle_dir) is None
    assert problem(bundle_dir, serve) is None


def move_out(model: onnx.ModelProto, location: str) -> None:
    """Let the numbers of a model's first large tensor come from another file."""
    tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def models() -> Iterator[Callable[[onnx.ModelProto], None]]:
    """Ways to change a policy's model."""
    for location in ("weights.bin", "../weights.bin", "/etc/passwd", "*/_ORT_MEM_ADDR_/*"):
        yield lambda m, location=location: move_out(m, location)
    yield lambda m: m.graph.initializer.pop()
    yield lambda m: m.graph.node.pop()
    yield lambda m: m.graph.node.pop(0)
    yield lambda m: m.graph.ClearField("input")
    yield lambda m: setattr(m.graph.input[0], "name", "\x1b[31mred")
    yield lambda m: m.graph.input[0].type.tensor_type.shape.dim[1].__setattr__("dim_value", 39)
    yield lambda m: setattr(m.graph.node[0], "op_type", "Evil")
    yield lambda m: setattr(m.graph.node[0], "domain", "com.evil")
    yield lambda m: setattr(m, "ir_version", 1000)
    yield scaled


def scaled(model: onnx.ModelProto) -> None:
    """Change the weights a little: a different policy that runs."""
    tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
    tensor.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(tensor), tensor.name))


@pytest.mark.parametrize("change", list(models()))
def test_other_models_than_the_recorded_one_are_refused(
    bundle_dir: Path, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.load(str(bundle_dir / POLICY_FILE))
    sizes = [len(tensor.raw_data) for tensor in model.graph.initializer]
    for folder in (bundle_dir.parent, bundle_dir.parent / "cwd"):
        folder.mkdir(exist_ok=True)
        (folder / "weights.bin").write_bytes(bytes(max(sizes)))
    monkeypatch.chdir(bundle_dir.parent / "cwd")
    before = model.SerializeToString()
    change(model)
    assert model.SerializeToString() != before
    (bundle_dir / POLICY_FILE).write_bytes(model.SerializeToString())
    rehash(bundle_dir)
    assert problem(bundle_dir) is None
    assert problem(bundle_dir, serve) is None


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"\xff" * 1000])
def test_bytes_that_are_no_model_are_refused(bundle_dir: Path, content: bytes) -> None:
    (bundle_dir / POLICY_FILE).write_bytes(content)
    rehash(bundle_dir)
    assert problem(bundle_dir) is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"task": 1}', '{"task": {"name": 1}}', '{"task": {"name": "gym/os:system"}}', "[" * 9999],
)
def test_a_simulation_of_something_else_is_refused(bundle_dir: Path, content: str) -> None:
    (bundle_dir / SIMULATION_FILE).write_text(content)
    rehash(bundle_dir)
    assert problem(bundle_dir) is None


def test_a_person_reads_hash_and_limits_before_the_robot_is_connected(bundle_dir: Path) -> None:
    (bundle_dir / SIMULATION_FILE).write_text("{}")  # the robot cannot be connected
    rehash(bundle_dir)
    lines = run(deploy.main, [f"bundle={bundle_dir}", "robot=sim", "speed=0.5"]).stderr.splitlines()
    assert lines[1].endswith(f"has SHA-256 {sha256(bundle_dir / BUNDLE_FILE)}")
    assert ["joint1", "-2.8973", "+2.8973", "1.0875", "0.1087"] in [line.split() for line in lines]
    assert ["tool,", "z", "-0.0180", "+0.4800"] in [line.split() for line in lines]


def test_a_message_of_onnx_runtime_ends_with_its_reason(bundle_dir: Path) -> None:
    model = onnx.load(str(bundle_dir / POLICY_FILE))
    model.graph.node[0].name, model.graph.node[0].op_type = "node" * 200, "Evil"
    (bundle_dir / POLICY_FILE).write_bytes(model.SerializeToString())
    rehash(bundle_dir)
    stderr = run(deploy.main, [f"bundle={bundle_dir}", "robot=sim"]).stderr
    assert "No Op registered for Evil" in stderr
