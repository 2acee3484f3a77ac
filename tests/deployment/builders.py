"""Bundles whose model is made by hand: every input moves the actions, and no policy has to be exported."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from embodied.core.spec import CameraSpec, Instruction
from embodied.core.user_files import sha256
from embodied.deployment.bundle.description import PARITY_FILE, POLICY_FILE, SIMULATION_FILE, Bundle
from embodied.deployment.bundle.format import read_bundle, write_description
from embodied.deployment.bundle.runner import OUTPUT_PREFIX, InputSpec, PolicyRunner
from tests.deployment.exports import flow_bundle

TYPES = {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64, np.uint8: TensorProto.UINT8}
CAMERAS = (CameraSpec("front", 6, 8), CameraSpec("wrist", 4, 4))
INSTRUCTIONS = (Instruction("lift the red cube", "red"), Instruction("lift the blue cube", "blue"))
SEES_AND_READS: dict[str, Any] = {"cameras": CAMERAS, "instructions": INSTRUCTIONS, "max_delay": 2}


def make_bundle(path: Path, **changes: Any) -> Bundle:
    """Write a bundle like that of ``flow_bundle`` with other fields, such as cameras; return its description.

    actions = offset + scale * tanh(sum of the means of all inputs, times a number for each entry of the chunk)
    """
    path.mkdir(parents=True, exist_ok=True)
    bundle = replace(read_bundle(flow_bundle()), **changes)
    bundle = replace(bundle, noise_shape=(bundle.horizon, bundle.action_dim))
    onnx.save(_model(bundle), str(path / POLICY_FILE))
    spec = InputSpec(bundle)
    inputs = {name: np.zeros((2, *shape), spec.types[name]) for name, shape in spec.shapes.items()}
    inputs["state"] += np.array([entry.low for entry in bundle.state_range], np.float32)
    np.savez(path / PARITY_FILE, **inputs)
    shutil.copy(flow_bundle() / SIMULATION_FILE, path)
    _describe(path, bundle)
    outputs = {f"{OUTPUT_PREFIX}actions": PolicyRunner(path).plan(inputs)}
    np.savez(path / PARITY_FILE, **inputs, **outputs)
    return _describe(path, bundle)


def _describe(path: Path, bundle: Bundle) -> Bundle:
    bundle = replace(bundle, files={name: sha256(path / name) for name in (POLICY_FILE, PARITY_FILE, SIMULATION_FILE)})
    write_description(path, bundle)
    return bundle


def _model(bundle: Bundle) -> onnx.ModelProto:
    spec, nodes, means = InputSpec(bundle), [], []
    for name, shape in spec.shapes.items():
        safe = name.replace(".", "_")
        nodes += [
            helper.make_node("Cast", [name], [f"{safe}_f"], to=TensorProto.FLOAT),
            helper.make_node("Reshape", [f"{safe}_f", "rows"], [f"{safe}_r"]),
            helper.make_node("ReduceMean", [f"{safe}_r", "last"], [f"{safe}_m"], keepdims=1),
        ]
        means.append(f"{safe}_m")
        assert all(size > 0 for size in shape)
    nodes += [
        helper.make_node("Sum", means, ["sum"]),
        helper.make_node("Mul", ["sum", "each"], ["product"]),
        helper.make_node("Tanh", ["product"], ["bounded"]),
        helper.make_node("Mul", ["bounded", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "offset"], ["actions"]),
    ]
    horizon, actions = bundle.horizon, bundle.action_dim
    each = 0.01 * np.arange(1, 1 + horizon * actions, dtype=np.float32).reshape(1, horizon, actions)
    constants = {
        "rows": np.array([0, 1, -1], np.int64),
        "last": np.array([2], np.int64),
        "each": each,
        "scale": np.array([term.scale for term in bundle.action], np.float32),
        "offset": np.array([term.offset for term in bundle.action], np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "mean",
        [
            helper.make_tensor_value_info(name, TYPES[spec.types[name]], ["N", *spec.shapes[name]])
            for name in spec.shapes
        ],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["N", horizon, actions])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
