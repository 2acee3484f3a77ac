"""A bundle: the directory with all that runs a policy on a robot. numpy alone reads it.

Files may be damaged or hostile: the answer is a value or a UserError of one line, and memory is bounded.
docs/sim_to_real.md lists the files. ``Bundle`` (description.py) is the content of ``bundle.json``.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from math import hypot, inf, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line
from embodied.core.spec import ArmSpec, described
from embodied.core.user_files import present, recorded, reference, sha256
from embodied.deployment.bundle.description import BESIDE_POLICY, PARITY_FILE, POLICY_FILE, SIMULATION_FILE, Bundle
from embodied.deployment.validation import MAX_MESSAGE, Ranges, check_range, from_json

FORMAT = 2  # version of the layout; a reader refuses others
BUNDLE_FILE = "bundle.json"
MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE = "config.json", "policy.json", "statistics.safetensors"
"""Files of a bundle in the layout of transformers, besides weights and tokenizer."""
OF_TRANSFORMERS = re.compile(
    r"((generation_|preprocessor_|processor_|tokenizer_)?config|policy|tokenizer|special_tokens_map|added_tokens|vocab"
    r"|model\.safetensors\.index)\.json|(model(-\d{5}-of-\d{5})?|statistics)\.safetensors|tokenizer\.model"
    r"|chat_template\.jinja|(merges|vocab)\.txt"
)
"""Files that a policy in the layout of transformers may have: no code, no pickles, nothing that points elsewhere."""
MAX_JSON_BYTES = 8 * 2**20
MAX_ARRAYS_BYTES = 2**33  # largest size of the arrays of a file
KINDS = "biufU"  # kinds of numpy's types that are numbers or texts

_LENGTH_M, _ANGLE, _UNIT = (-10.0, 10.0), (-100.0, 100.0), (-1.001, 1.001)
RANGES: Ranges = {
    "format": (1, 1000), "origin.env_steps": (0, 1e15), "origin.success_at_end": (0, 1), "history": (1, 1),
    "control_dt_s": (1e-3, 10), "max_episode_steps": (1, 1e6), "horizon": (1, 1e4), "execute": (1, 1e4),
    "max_delay": (0, 1e4), "noise_shape[]": (1, 1e5), "parity_tolerance": (0, 1e-3), "parity_max": (0, 1e-3),
    "state[].size": (1, 1024), "state[].scale": (1e-6, 1e6), "state[].difference.offset[]": _LENGTH_M,
    "state_range[].low": (-1e4, 1e4), "state_range[].high": (-1e4, 1e4),
    "cameras[].height": (1, 4096), "cameras[].width": (1, 4096),
    "action[].scale": _LENGTH_M, "action[].offset": _LENGTH_M,
    "arm.joints[].pos_m[]": _LENGTH_M, "arm.joints[].quat[]": _UNIT, "arm.joints[].axis[]": _UNIT,
    "arm.joints[].low": _ANGLE, "arm.joints[].high": _ANGLE, "arm.joints[].home": _ANGLE,
    "arm.joints[].max_velocity": (1e-3, 20), "arm.joints[].max_effort": (0, 1e5),
    "arm.joints[].stiffness": (1e-3, 1e6), "arm.joints[].damping": (1e-3, 1e6),
    "arm.tool_pos_m[]": _LENGTH_M, "arm.tool_quat[]": _UNIT, "arm.damping": (1e-6, 10), "arm.posture_gain": (0, 1),
    "arm.workspace_low_m[]": _LENGTH_M, "arm.workspace_high_m[]": _LENGTH_M,
    "arm.gripper.open_m": (-4, 4), "arm.gripper.closed_m": (-4, 4), "arm.gripper.max_position_m": (0, 4),
    "arm.gripper.max_step_m": (1e-6, 1), "arm.gripper.fingers": (1, 100),
}  # fmt: skip
"""Lowest and highest value of each number of ``Bundle``; ``[]`` stands for every entry of a list. Those of ``arm`` are
also those of ``right_arm``."""
MAX_ENTRIES = 4096  # entries of a list
MAX_TEXT = 10_000  # letters of a text
MAX_NOISE = 2**20
MAX_LEAD_TIME_S = 1.0
"""Largest damping / stiffness. Times the largest speed it is how far a target may be ahead of the joint."""
RANGE_SLACK = 0.1  # share of a joint's range by which recorded positions may be outside of its limits
SIZES = {"finger_target": 1, "tcp_pos": 3, "tcp_vel": 3}
"""Sizes of the terms that a robot's computer makes itself, besides those by joint and by finger."""


def write_description(path: Path, bundle: Bundle) -> None:
    (path / BUNDLE_FILE).write_text(json.dumps(described(bundle), indent=1) + "\n", encoding="utf-8")


def read_bundle(path: Path, with_policy: bool = True) -> Bundle:
    """Read and check a bundle. UserError for a missing or changed file, another format or a malformed description.

    with_policy: whether the policy's own files are needed; a server has them where another machine plans.
    """
    if not (path / BUNDLE_FILE).is_file():
        what = "has no bundle.json" if path.is_dir() else "is not a directory"
        raise UserError(f"bundle={path} {what}: give the directory that 'python -m embodied.export' wrote")
    content = read_json(path / BUNDLE_FILE, MAX_JSON_BYTES)
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        got = repr(found)[:30]
        raise UserError(f"{path / BUNDLE_FILE} has format {got}, this version reads {FORMAT}: export the run again")
    bundle = parse_bundle(content, BUNDLE_FILE)
    _check_files(path, bundle, with_policy)
    return bundle


def parse_bundle(content: Any, where: str) -> Bundle:
    """Return the description of a bundle from JSON values. UserError if it is malformed.

    So is a number that no arm can have, whoever wrote it, or a text or size that does not fit. where: for messages.
    """
    bundle = from_json(Bundle, content, where)
    for name, value in _leaves(asdict(bundle), ""):
        if isinstance(value, str):
            if len(value) > MAX_TEXT or not value.isprintable():
                raise UserError(f"{where}: {name}: got {one_line(value)[:60]!r}, allowed: printable text")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            check_range(f"{where}: {name}", value, *RANGES[re.sub(r"\[\d+\]", "[]", name).removeprefix("right_")])
    rules = _of_sizes(bundle), _of_arm("arm", bundle.arm), _of_right_arm(bundle), _of_action(bundle), _of_terms(bundle)
    for fits, message in chain(*rules):  # one after the other: later ones rely on the sizes
        if not fits:
            raise UserError(f"{where}: {one_line(message)}")
    return bundle


def read_simulation(path: Path) -> dict[str, Any]:
    """Return ``simulation.json`` of a bundle: options of a task of our pool, and its simulator. UserError otherwise."""
    found = read_json(path / SIMULATION_FILE, MAX_JSON_BYTES)
    task = found.get("task") if isinstance(found, dict) else None
    name = task.get("name") if isinstance(task, dict) else None
    if not isinstance(task, dict) or (not reference(name) and not (isinstance(name, str) and name.isidentifier())):
        # gym/<module>:<class> would import and run code
        raise UserError(f"{path / SIMULATION_FILE}: task.name: got {str(name)[:60]!r}, needed the name of a task")
    return {**found, "task": present(recorded(task, path), path)}


def _check_files(path: Path, bundle: Bundle, with_policy: bool) -> None:
    """Raise UserError unless a bundle's directory has the files of its description, unchanged, and no others."""
    onnx = bundle.layout == "onnx"
    of_policy = (POLICY_FILE,) if onnx else (MODEL_FILE, OPTIONS_FILE, STATISTICS_FILE)
    for name in (*of_policy, PARITY_FILE, SIMULATION_FILE):
        if name not in bundle.files:
            raise UserError(f"{BUNDLE_FILE}: files: lacks the hash of {name}")
    for name in bundle.files:
        if name not in (*of_policy, *BESIDE_POLICY) and (onnx or not OF_TRANSFORMERS.fullmatch(name)):
            raise UserError(f"{BUNDLE_FILE}: files: got '{name[:60]}', which no bundle of this layout has")
    for entry in path.iterdir():
        if entry.name not in (BUNDLE_FILE, *bundle.files):
            name = one_line(entry.name)[:60]
            raise UserError(f"bundle={path} has '{name}', which was not exported: move it elsewhere")
    for name, expected in bundle.files.items():
        if not with_policy and name not in BESIDE_POLICY:
            continue
        if not (path / name).is_file():
            raise UserError(f"bundle={path} lacks {name}: copy the whole directory")
        if sha256(path / name) != expected:
            raise UserError(f"{path / name} is not the file that was exported (its SHA-256 differs): copy it again")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all values that are no list or dict, with their names. UserError for a long list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{name} key", key
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, (list, tuple)):
        if len(value) > MAX_ENTRIES:
            raise UserError(f"{name}: has {len(value)} entries, allowed: at most {MAX_ENTRIES}")
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{i}]")
    else:
        yield name, value


Rules = Iterator[tuple[bool, str]]  # whether something fits, and what to say if it does not


def _of_sizes(bundle: Bundle) -> Rules:
    """Yield the rules between chunk, actions, noise, cameras and instructions."""
    joints = len(bundle.arm.joints)
    needed = len(bundle.arms) * ((joints if bundle.arm.control == "joint_delta" else 3 + bundle.arm.rotation) + 1)
    yield joints > 0, "arm.joints: is empty"
    yield bundle.action_dim == needed, f"action: has {bundle.action_dim} entries, the arm's control needs {needed}"
    yield bundle.action_type == bundle.arm.control, f"action_type: got {bundle.action_type}, arm.control has another"
    yield bundle.execute <= bundle.horizon, f"execute: got {bundle.execute}, allowed: at most horizon {bundle.horizon}"
    yield bundle.max_delay <= bundle.horizon, f"max_delay: got {bundle.max_delay}, horizon is {bundle.horizon}"
    noise = list(bundle.noise_shape)
    yield bool(noise) and prod(noise) <= MAX_NOISE, f"noise_shape: got {noise}, allowed: at most {MAX_NOISE} numbers"
    for key, names in (
        ("arm.joints", [joint.name for joint in bundle.arm.joints]),
        ("state", [term.name for term in bundle.state]),
        ("action", [term.name for term in bundle.action]),
        ("cameras", [camera.name for camera in bundle.cameras]),
        ("instructions", [instruction.text for instruction in bundle.instructions]),
    ):
        yield len(set(names)) == len(names) and all(name.strip() for name in names), f"{key}: a name is twice or blank"


def _of_terms(bundle: Bundle) -> Rules:
    """Yield the rules of the terms of the state and their recorded ranges."""
    sizes = SIZES | dict.fromkeys(("joint_pos", "joint_vel", "joint_target"), len(bundle.arm.joints))
    sizes["fingers"] = bundle.arm.gripper.fingers
    sizes = {side + name: size for side in bundle.arms for name, size in sizes.items()}
    names = [name for term in bundle.state for name in term.entry_names]
    known = set(sizes) | {term.name for term in bundle.state if term.difference is None}
    yield bool(names), "state: is empty"
    for term in bundle.state:
        needed = sizes.get(term.name, term.size)
        yield term.size == needed, f"state: {term.name} has {term.size} entries, the arm needs {needed}"
        if term.difference is not None:
            for name in (term.difference.of, term.difference.minus):
                yield name in known, f"state: {term.name} is a difference of '{name}', which is no term before it"
            yield len(term.difference.offset) <= max(3, term.size), f"state: {term.name} has an offset that is too long"
            known.add(term.name)
    found = [entry.name for entry in bundle.state_range]
    yield found == names, f"state_range: has {len(found)} entries, needed those of state, {len(names)}, in order"
    joints = {f"{side}joint_pos[{i}]": joint for side, arm in bundle.arms.items() for i, joint in enumerate(arm.joints)}
    for entry in bundle.state_range:
        yield entry.low <= entry.high, f"state_range: {entry.name}: low {entry.low:g} is above high {entry.high:g}"
        joint = joints.get(entry.name)
        if joint is not None:
            slack = RANGE_SLACK * (joint.high - joint.low)
            inside = joint.low - slack <= entry.low and entry.high <= joint.high + slack
            ends = f"{entry.low:g} to {entry.high:g}"
            yield inside, f"state_range: {entry.name}: {ends} is outside of {joint.name}'s limits"


def _of_arm(key: str, arm: ArmSpec) -> Rules:
    """Yield the rules of an arm's joints and workspace."""
    for i, joint in enumerate(arm.joints):
        where = f"{key}.joints[{i}]"
        yield joint.low < joint.high, f"{where}: low {joint.low:g} is not below high {joint.high:g}"
        yield joint.low <= joint.home <= joint.high, f"{where}: home {joint.home:g} is outside of low to high"
        ahead_s = joint.damping / joint.stiffness
        yield ahead_s <= MAX_LEAD_TIME_S, f"{where}: damping / stiffness is {ahead_s:g} s, allowed: {MAX_LEAD_TIME_S:g}"
        vectors = {f"{where}.quat": joint.quat, f"{where}.axis": joint.axis, f"{key}.tool_quat": arm.tool_quat}
        for name, vector in vectors.items():
            yield abs(hypot(*vector) - 1) < 1e-3, f"{name}: its length is {hypot(*vector):g}, needed 1"
    for low, high in zip(arm.workspace_low_m, arm.workspace_high_m, strict=True):
        yield low < high, f"{key}.workspace: low {low:g} is not below high {high:g}"


def _of_right_arm(bundle: Bundle) -> Rules:
    """Yield the rules of a second arm, which differs from the first one only by where it stands."""
    arm, right = bundle.arm, bundle.right_arm
    if right is None:
        return
    yield from _of_arm("right_arm", right)
    place = right.joints[0].pos_m if right.joints else (0.0, 0.0, 0.0)
    joints = tuple(replace(joint, pos_m=place) for joint in arm.joints[:1]) + arm.joints[1:]
    low_m, high_m = right.workspace_low_m, right.workspace_high_m
    same = replace(arm, joints=joints, workspace_low_m=low_m, workspace_high_m=high_m) == right
    yield same, "right_arm: is of another kind than arm"


def _of_action(bundle: Bundle) -> Rules:
    """Yield the rules of the gripper and of the actions: an arm's last one commands it, others have a scale > 0."""
    gripper, action = bundle.arm.gripper, bundle.action
    ends, unit = (gripper.closed_m, gripper.open_m), gripper.position_unit
    yield unit == "rad" or max(*map(abs, ends), gripper.max_position_m) <= 1, "arm.gripper: a position is above 1 m"
    yield ends[0] != ends[1] and max(ends) <= gripper.max_position_m, "arm.gripper: open, closed and largest do not fit"
    size = len(action) // len(bundle.arms)
    for side, last, i in zip(bundle.arms, action[size - 1 :: size], range(0, len(action), size), strict=True):
        named = all(term.name.startswith(side) for term in action[i : i + size])
        yield named, f"action: entries {i} to {i + size - 1} are of one arm, and have names that begin with {side}"
        low, high = last.offset - last.scale, last.offset + last.scale
        close = max(abs(low - ends[0]), abs(high - ends[1])) < 1e-6
        ours, needed = f"{low:g} to {high:g} {unit}", f"{ends[0]:g} to {ends[1]:g} {unit}"
        yield close, f"action: {last.name} is {ours}, the gripper's {needed}"
    moves = [term.scale for i, term in enumerate(action) if (i + 1) % size]
    yield min(moves, default=inf) > 0, f"action: a scale is {min(moves, default=inf):g}, allowed: above 0"


def read_json(path: Path, max_bytes: int) -> Any:
    """Return the content of a JSON file. UserError if it cannot be read or has more than ``max_bytes``."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"it is larger than {max_bytes} bytes")
        return json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)[:MAX_MESSAGE]}") from error


def load_arrays(path: Path, max_bytes: int = MAX_ARRAYS_BYTES) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, by name, without loading pickles.

    UserError for another file, for arrays of objects, and for more than ``max_bytes`` of numbers. Nothing is allocated
    before the headers of all arrays have passed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            left = max_bytes if path.stat().st_size <= max_bytes else -1
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    if npy.read_magic(file) != (1, 0):
                        raise ValueError(f"{entry.filename} is no array of version 1.0")
                    shape, _, dtype = npy.read_array_header_1_0(file)
                    if dtype.kind not in KINDS or any(size < 0 for size in shape):
                        raise ValueError(f"{entry.filename} has {dtype} {list(shape)}")
                    left -= prod(shape) * dtype.itemsize
            if left < 0:
                raise ValueError(f"its arrays have more than {max_bytes} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # zipfile and numpy raise many kinds for damaged files
        raise UserError(f"cannot read {path}: {one_line(error)[:MAX_MESSAGE]}") from error
