"""Run a bundle's policy with ONNX Runtime. Imports numpy and onnxruntime alone.

runner = PolicyRunner(Path("bundles/pick_place"))
chunk = runner.plan({"state": state, "noise": noise})      # [N, H, A], physical units
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from embodied.core.errors import UserError, one_line, unknown_name
from embodied.core.spec import Box
from embodied.deployment.bundle.description import PARITY_FILE, POLICY_FILE, Bundle
from embodied.deployment.bundle.format import load_arrays, read_bundle
from embodied.deployment.robots.base import Unusable
from embodied.deployment.validation import MAX_MESSAGE

OUTPUT_PREFIX = "output/"  # of the recorded outputs in parity.npz; the other arrays are inputs
# A state may leave the recorded range by twice its width and this. A toppled object or a blow to the arm is no mistake
# of units: rotations, which have no unit, are in [-1, 1], and velocities of a blow are within these margins.
MARGIN = {"m": 0.1, "m/s": 5.0, "rad/s": 10.0, "": 2.0}
OTHER_MARGIN = 0.5  # of entries with other units
FATAL_ONLY = 4  # log severity of ONNX Runtime
EXTERNAL = re.compile(rb"[\x00\x08]location")  # the key of an ONNX tensor whose numbers are in another file
MAX_PARITY_BYTES = 2**28
RANGE_TOLERANCE = 1e-3  # largest distance of an action from its range, in units of its scale


class Planner(Protocol):
    """What plans chunks: a runner in this process, or the client of a server."""

    bundle: Bundle

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the chunk [N, H, A] in physical units. UserError for an input of wrong name, shape, type or value."""


class InputSpec:
    """Names, shapes and types of a bundle's inputs, and the check that a request has them."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.shapes: dict[str, tuple[int, ...]] = {"state": (bundle.state_dim,), "noise": bundle.noise_shape}
        self.types: dict[str, type[np.generic]] = {"state": np.float32, "noise": np.float32}
        for camera in bundle.cameras:
            self.shapes[f"images.{camera.name}"] = (camera.height, camera.width, 3)
            self.types[f"images.{camera.name}"] = np.uint8
        if bundle.cameras and bundle.instructions:
            self.shapes["instruction"], self.types["instruction"] = (), np.int64
        if bundle.max_delay:
            self.shapes["prefix"], self.types["prefix"] = (bundle.max_delay, bundle.action_dim), np.float32
            self.shapes["delay"], self.types["delay"] = (), np.int64
        self._chunk_shape = (bundle.horizon, bundle.action_dim)
        action = Box(bundle.action)
        self._offset, self._reach = action.offset, (1 + RANGE_TOLERANCE) * np.abs(action.scale)
        low, high = (np.array([getattr(entry, end) for entry in bundle.state_range]) for end in ("low", "high"))
        units = [term.unit for term in bundle.state for _ in range(term.size)]
        margin = 2 * (high - low) + np.array([MARGIN.get(unit, OTHER_MARGIN) for unit in units])
        self._low, self._high, self._units = low - margin, high + margin, units

    def check(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the inputs, contiguous. UserError for a wrong name, shape, type or value; nothing is converted."""
        for name in inputs:
            if name not in self.shapes:
                raise unknown_name("input", name, self.shapes)
        missing = [name for name in self.shapes if name not in inputs]
        if missing:
            raise UserError(f"the observation lacks {', '.join(missing)}; the policy needs {', '.join(self.shapes)}")
        rows = len(inputs["state"]) if np.ndim(inputs["state"]) else 0
        for name, shape in self.shapes.items():
            value, kind = inputs[name], self.types[name]
            if value.dtype != kind or value.shape != (rows, *shape) or not rows:
                needed = f"{np.dtype(kind)} {['N', *shape]} with the same N, at least 1, for all inputs"
                raise UserError(f"{name}: got {value.dtype} {list(value.shape)}, needed {needed}")
        for name in {"state", "noise", "prefix"} & self.shapes.keys():
            if not np.isfinite(inputs[name]).all():
                raise UserError(f"{name}: has NaN or infinite numbers")
        self.check_range(inputs["state"])
        for name, highest in (("instruction", len(self._bundle.instructions) - 1), ("delay", self._bundle.max_delay)):
            if name in self.shapes and (inputs[name].min() < 0 or inputs[name].max() > highest):
                raise UserError(f"{name}: got {inputs[name].tolist()[:5]}, allowed: 0 to {highest}")
        return {name: np.ascontiguousarray(inputs[name]) for name in self.shapes}

    def check_range(self, state_NS: NDArray[Any]) -> None:
        """Raise Unusable for an entry that is far outside of what was recorded in training's environments."""
        outside = (state_NS < self._low) | (state_NS > self._high)
        if not outside.any():
            return
        row, column = np.argwhere(outside)[0]
        entry, unit = self._bundle.state_range[column], self._units[column]
        far = f"is {state_NS[row, column]:.4g}, training saw {entry.low:.4g} to {entry.high:.4g} {unit}"
        raise Unusable("range", f"state: {entry.name} {far}: check unit, order, sign and place")

    def check_chunk(self, chunk_NHA: Any, rows: int) -> NDArray[np.float32]:
        """Return what a policy planned for ``rows`` rows. UserError unless it is within the ranges of its actions."""
        needed = (rows, *self._chunk_shape)
        if not isinstance(chunk_NHA, np.ndarray) or chunk_NHA.dtype != np.float32 or chunk_NHA.shape != needed:
            got = f"{chunk_NHA.dtype} {list(chunk_NHA.shape)}" if isinstance(chunk_NHA, np.ndarray) else "nothing"
            raise UserError(f"the policy planned {got}, needed float32 {list(needed)}")
        if not (np.abs(chunk_NHA - self._offset) <= self._reach).all():  # also if one is NaN
            wrong = "an action outside of its range" if np.isfinite(chunk_NHA).all() else "NaN or infinite numbers"
            raise UserError(f"the policy's output has {wrong}")
        return chunk_NHA


class PolicyRunner:
    """A ``Planner`` in this process. path: bundle, whose hashes are checked. num_threads: threads of one inference."""

    def __init__(self, path: Path, num_threads: int = 1) -> None:
        self.path, self.bundle = path, read_bundle(path)
        if self.bundle.layout != "onnx":
            cure = "run 'python -m embodied.serve' on another machine, and give server=ws://<machine>:8000 here"
            raise UserError(f"bundle={path} needs torch and transformers: {cure}")
        self.inputs = InputSpec(self.bundle)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
        options.log_severity_level = FATAL_ONLY
        model = (path / POLICY_FILE).read_bytes()
        if EXTERNAL.search(model):
            raise UserError(f"{path / POLICY_FILE} has numbers in another file, whose content nothing vouches for")
        try:
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no common base of its errors
            raise UserError(
                f"{path / POLICY_FILE} cannot be loaded: {one_line(error)[-MAX_MESSAGE:]}"
            ) from error  # its end has the reason
        found = {value.name for value in self._session.get_inputs()}
        if found != set(self.inputs.shapes):
            takes = one_line(sorted(found))[:MAX_MESSAGE]
            raise UserError(f"{path / POLICY_FILE} takes {takes}, the description {sorted(self.inputs.shapes)}")

    def plan(self, inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        checked = self.inputs.check(inputs)
        try:
            chunk = self._session.run(None, checked)[0]
        except Exception as error:  # onnxruntime has no common base of its errors
            raise UserError(f"{self.path / POLICY_FILE} cannot be run: {one_line(error)[-MAX_MESSAGE:]}") from error
        return self.inputs.check_chunk(chunk, len(checked["state"]))


def parity(planner: Planner, path: Path) -> float:
    """Return the largest difference from recorded plans, in the action's scale. UserError for another recording."""
    arrays = load_arrays(path / PARITY_FILE, MAX_PARITY_BYTES)
    inputs = {name: value for name, value in arrays.items() if not name.startswith(OUTPUT_PREFIX)}
    chunk, recorded = planner.plan(inputs), arrays.get(f"{OUTPUT_PREFIX}actions")
    if recorded is None or recorded.shape != chunk.shape or recorded.dtype != np.float32:
        raise UserError(f"{path / PARITY_FILE} has no {OUTPUT_PREFIX}actions of float32 {list(chunk.shape)}")
    return float((np.abs(chunk - recorded) / np.abs(Box(planner.bundle.action).scale)).max())


def check_parity(planner: Planner, path: Path, tolerance: float | None = None) -> float:
    """Return ``parity``. UserError if it is above the tolerance; None is that of the bundle."""
    found, allowed = parity(planner, path), planner.bundle.parity_tolerance if tolerance is None else tolerance
    if not found <= allowed:  # also if it is NaN
        differ = f"differ by {found:.2g} of the action's scale, allowed: {allowed:g}"
        raise UserError(f"the outputs of torch and of the runner {differ}: this is not the model that was recorded")
    return found
