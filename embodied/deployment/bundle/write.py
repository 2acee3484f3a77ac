"""Write a bundle (embodied.deployment.bundle.format) from a policy and observations that were recorded with it.

policy, observations ──► model, ranges, outputs of torch ──► files ──► runner: the same outputs?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import Box, EnvSpec
from embodied.core.types import Obs
from embodied.deployment.bundle.description import (
    PARITY_FILE,
    POLICY_FILE,
    README_FILE,
    SIMULATION_FILE,
    Bundle,
    ObservedRange,
    Origin,
)
from embodied.deployment.bundle.files import sha256
from embodied.deployment.bundle.format import FORMAT, write_description
from embodied.deployment.bundle.onnx import PhysicalPlan, export_onnx
from embodied.deployment.bundle.readme import NOTES, bundle_readme
from embodied.deployment.bundle.runner import OUTPUT_PREFIX, PolicyRunner, check_parity
from embodied.deployment.bundle.torch_runner import PolicyBuilder, TorchRunner, write_model

TOLERANCE = 1e-5
"""Largest allowed difference between torch and ONNX Runtime, in units of the action's scale."""
PARITY_ROWS = 64
MAX_ONNX_BYTES = 2**30
"""Largest weights that are exported as ONNX, float32; a file can have 2 GB."""


@dataclass(frozen=True)
class Source:
    """What a bundle is written from."""

    policy: Policy
    """The policy, with its trained weights."""
    spec: EnvSpec
    """Spec of the environment that it was trained in."""
    recorded: Obs
    """Observations of its decisions, as the environment gives them, [F, ...]."""
    origin: Origin
    """Where it comes from."""
    policy_section: Mapping[str, Any]
    """Section ``policy`` of the run's configuration."""
    simulation: Mapping[str, Any]
    """Content of ``simulation.json``."""
    noise: Literal["zero", "seeded"] = "zero"
    """Noise of deployment."""
    max_delay: int = 0
    """Largest inference delay that the policy was trained for, control steps."""
    seed: int = 0
    """Seed of the recorded rows and their noise."""


def check_exportable(spec: EnvSpec) -> None:
    """Raise UserError unless a robot's computer can execute the policy's actions."""
    if not isinstance(spec.action, Box):
        raise UserError(f"task {spec.task} has choices for actions: only continuous actions can be exported")
    if spec.arm is None:
        raise UserError(
            f"task {spec.task} does not describe the arm of its robot '{spec.robot}' (EnvSpec.arm): its kinematics and "
            "limits are unknown. A GripperArm needs max_velocity"
        )


def chosen_layout(policy: Policy, layout: str = "auto") -> str:
    """Return ``onnx`` or ``transformers``; ``auto`` is ONNX unless the weights are too large for one file."""
    size = 4 * sum(weight.numel() for weight in policy.parameters())
    if layout == "auto":
        return policy.library if policy.library is not None and size > MAX_ONNX_BYTES else "onnx"
    return layout


def write_bundle(path: Path, source: Source, build: PolicyBuilder, layout: str = "onnx") -> Bundle:
    """Write all files of a bundle into an empty directory; return its description.

    build: rebuilds the policy in the layout of transformers. UserError if the runner's outputs differ from torch's by
    more than TOLERANCE.
    """
    policy = source.policy
    inputs = _inputs(source)
    plan = PhysicalPlan(policy.eval(), source.spec, tuple(inputs))
    if layout == "onnx":
        few = {name: value[:3] for name, value in inputs.items()}
        export_onnx(plan, few, path / POLICY_FILE, _metadata(source))
    else:
        write_model(path, policy, source.policy_section)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    with torch.no_grad():
        arrays[f"{OUTPUT_PREFIX}actions"] = plan(*inputs.values()).numpy()
    np.savez(path / PARITY_FILE, **arrays)  # type: ignore[arg-type]  # keys are names of arrays
    (path / SIMULATION_FILE).write_text(json.dumps(source.simulation, indent=1) + "\n", encoding="utf-8")
    bundle = replace(_describe(source), files={file.name: sha256(file) for file in sorted(path.iterdir())})
    (path / README_FILE).write_text(bundle_readme(bundle), encoding="utf-8")
    bundle = replace(bundle, files=bundle.files | {README_FILE: sha256(path / README_FILE)})
    write_description(path, bundle)
    difference = check_parity(PolicyRunner(path) if layout == "onnx" else TorchRunner(path, build), path)
    bundle = replace(bundle, parity_max=difference)
    write_description(path, bundle)
    return bundle


def _inputs(source: Source) -> dict[str, Tensor]:
    """Return rows of recorded observations as inputs of the exported model: physical units; half have noise 0."""
    generator = torch.Generator().manual_seed(source.seed)
    count = len(source.recorded["state"])
    rows = torch.randperm(count, generator=generator)[:PARITY_ROWS]
    inputs = {key: value[rows] for key, value in source.recorded.items()}
    noise = torch.randn(len(rows), *source.policy.plan_noise_shape, generator=generator)
    noise[::2] = 0.0
    inputs |= {"state": inputs["state"] / _state_scale(source.spec), "noise": noise}
    if "prefix" in inputs:
        terms = _action(source.spec).terms
        scale, offset = (torch.tensor([getattr(term, name) for term in terms]) for name in ("scale", "offset"))
        inputs["prefix"] = inputs["prefix"] * scale + offset
    return inputs


def _state_scale(spec: EnvSpec) -> Tensor:
    """Return the observed number per physical one for each entry of the state, [S]."""
    return torch.tensor([term.scale for term in spec.state for _ in range(term.size)])


def _action(spec: EnvSpec) -> Box:
    """Return the space of actions, which ``check_exportable`` has passed."""
    assert isinstance(spec.action, Box)
    return spec.action


def _describe(source: Source) -> Bundle:
    """Return the description of the bundle, without the hashes of its files."""
    spec, policy = source.spec, source.policy
    assert spec.arm is not None
    state = source.recorded["state"] / _state_scale(spec)
    ends = zip(spec.state_names, state.amin(0).tolist(), state.amax(0).tolist(), strict=True)
    return Bundle(
        format=FORMAT,
        origin=source.origin,
        state=spec.state,
        state_range=tuple(ObservedRange(*entry) for entry in ends),
        history=1,
        cameras=spec.cameras,
        instructions=spec.instructions,
        action_type=spec.arm.control,
        action=_action(spec).terms,
        arm=spec.arm,
        robot=spec.robot,
        control_dt_s=spec.control_dt_s,
        max_episode_steps=spec.max_episode_steps,
        horizon=policy.horizon,
        execute=policy.execute,
        max_delay=source.max_delay,
        noise_shape=policy.plan_noise_shape,
        noise=source.noise,
        files={},
        parity_tolerance=TOLERANCE,
        parity_max=0.0,
        notes=NOTES,
    )


def _metadata(source: Source) -> dict[str, str]:
    """Return the metadata of policy.onnx; keys and format (three decimals, commas) as mjlab's exporter writes them."""
    spec = source.spec
    assert spec.arm is not None
    joints = spec.arm.joints

    def csv(values: list[float]) -> str:
        return ",".join(f"{value:.3f}" for value in values)

    return {
        "run_path": source.origin.run,
        "joint_names": ",".join(joint.name for joint in joints),
        "joint_stiffness": csv([joint.stiffness for joint in joints]),
        "joint_damping": csv([joint.damping for joint in joints]),
        "default_joint_pos": csv([joint.home for joint in joints]),
        "command_names": "",
        "observation_names": ",".join(term.name for term in spec.state),
        "action_scale": csv([term.scale for term in _action(spec).terms]),
    }
