"""Write a bundle (embodied.deployment.bundle.format) from a run's policy.

policy in its simulation ──► recorded observations ──► model, ranges, outputs of torch ──► runner: the same outputs?
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.execution import Deployment
from embodied.core.protocols import Policy, Pretrained
from embodied.core.spec import Box, EnvSpec
from embodied.core.types import Obs
from embodied.deployment.bundle.files import sha256
from embodied.deployment.bundle.format import (
    FORMAT,
    PARITY_FILE,
    POLICY_FILE,
    README_FILE,
    SIMULATION_FILE,
    Bundle,
    ObservedRange,
    Origin,
    write_description,
)
from embodied.deployment.bundle.onnx import PhysicalPlan, export_onnx
from embodied.deployment.bundle.readme import NOTES, bundle_readme
from embodied.deployment.bundle.runner import OUTPUT_PREFIX, PolicyRunner, check_parity
from embodied.runtime import threads
from embodied.runtime.checkpoint import Checkpoint
from embodied.session.config import RunConfig
from embodied.session.factories import evaluation_plans, make_acting_env
from embodied.session.torch_runner import TorchRunner, write_model

TOLERANCE = 1e-5
"""Largest allowed difference between torch and ONNX Runtime, in units of the action's scale."""
PARITY_ROWS = 64
MAX_ONNX_BYTES = 2**30
"""Largest weights that are exported as ONNX, float32; a file can have 2 GB."""
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "mujoco", "numpy")


def check_exportable(spec: EnvSpec) -> None:
    """Raise UserError unless a robot's computer can execute the policy's actions."""
    if not isinstance(spec.action, Box):
        raise UserError(f"task {spec.task} has choices for actions: only continuous actions can be exported")
    if spec.arm is None:
        raise UserError(
            f"task {spec.task} does not describe the arm of its robot '{spec.robot}' (EnvSpec.arm): its kinematics and "
            "limits are unknown. A GripperArm needs max_velocity"
        )


def record(config: RunConfig, policy: Policy, episodes: int) -> Obs:
    """Return the observations of all decisions of the deployed policy in ``episodes`` episodes, [F, ...]."""
    with closing(make_acting_env(config, episodes, threads.available_cores())) as env:
        deployment = Deployment(policy, env, evaluation_plans(env.spec, episodes, config.seed), seeded=False)
        seen = []
        for _ in range(ceil(env.spec.max_episode_steps / policy.execute)):
            seen.append(deployment.obs)
            deployment.step()
    return {key: torch.cat([obs[key] for obs in seen]) for key in seen[0] if key != "privileged"}


def chosen_layout(policy: Policy, layout: str = "auto") -> str:
    """Return ``onnx`` or ``transformers``; ``auto`` is ONNX unless the weights are too large for one file."""
    assert isinstance(policy, nn.Module)
    size = 4 * sum(weight.numel() for weight in policy.parameters())
    if layout == "auto":
        return "transformers" if isinstance(policy, Pretrained) and size > MAX_ONNX_BYTES else "onnx"
    return layout


def write_bundle(
    path: Path, config: RunConfig, policy: Policy, spec: EnvSpec, recorded: Obs, origin: Origin, layout: str = "onnx"
) -> Bundle:
    """Write all files of a bundle into an empty directory; return its description.

    recorded: observations as the environment gives them. UserError if the runner's outputs differ from torch's by more
    than TOLERANCE.
    """
    assert isinstance(policy, nn.Module)
    inputs = _inputs(policy, spec, recorded, config.seed)
    plan = PhysicalPlan(policy.eval(), spec, tuple(inputs))
    if layout == "onnx":
        few = {name: value[:3] for name, value in inputs.items()}
        export_onnx(plan, few, path / POLICY_FILE, _metadata(spec, origin))
    else:
        write_model(path, policy, config.policy)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    with torch.no_grad():
        arrays[f"{OUTPUT_PREFIX}actions"] = plan(*inputs.values()).numpy()
    np.savez(path / PARITY_FILE, **arrays)  # type: ignore[arg-type]  # keys are names of arrays
    (path / SIMULATION_FILE).write_text(
        json.dumps({"task": config.task, "sim": config.sim}, indent=1) + "\n", encoding="utf-8"
    )
    bundle = replace(_describe(config, policy, spec, recorded, origin), files=_hashes(path))
    (path / README_FILE).write_text(bundle_readme(bundle), encoding="utf-8")
    bundle = replace(bundle, files=bundle.files | {README_FILE: sha256(path / README_FILE)})
    write_description(path, bundle)
    found = check_parity(PolicyRunner(path) if layout == "onnx" else TorchRunner(path), path)
    bundle = replace(bundle, parity_max=found)
    write_description(path, bundle)
    return bundle


def _hashes(path: Path) -> dict[str, str]:
    """Return the SHA-256 of all files of a directory, by name."""
    return {file.name: sha256(file) for file in sorted(path.iterdir())}


def origin_of(config: RunConfig, run_dir: Path, found: Checkpoint) -> Origin:
    """Return where a bundle of a run's checkpoint comes from."""
    finals = sorted((run_dir / "eval").glob(f"final_{found.env_steps}.json"))
    success = json.loads(finals[-1].read_text(encoding="utf-8")).get("success_at_end") if finals else None
    versions = {name: version(name) for name in LIBRARIES}
    name, checkpoint = str(config.policy["name"]), found.path.name
    return Origin(str(config.task["name"]), name, str(run_dir), checkpoint, found.env_steps, success, versions)


def _inputs(policy: Policy, spec: EnvSpec, recorded: Obs, seed: int) -> dict[str, Tensor]:
    """Return rows of recorded observations as inputs of the exported model: physical units; half have noise 0."""
    generator = torch.Generator().manual_seed(seed)
    count = len(recorded["state"])
    rows = torch.randperm(count, generator=generator)[:PARITY_ROWS]
    inputs = {key: value[rows] for key, value in recorded.items()}
    noise = torch.randn(len(rows), *policy.plan_noise_shape, generator=generator)
    noise[::2] = 0.0
    inputs |= {"state": inputs["state"] / _state_scale(spec), "noise": noise}
    if "prefix" in inputs:
        assert isinstance(spec.action, Box)
        scale, offset = (
            torch.tensor([getattr(term, name) for term in spec.action.terms]) for name in ("scale", "offset")
        )
        inputs["prefix"] = inputs["prefix"] * scale + offset
    return inputs


def _state_scale(spec: EnvSpec) -> Tensor:
    """Return the observed number per physical one for each entry of the state, [S]."""
    return torch.tensor([term.scale for term in spec.state for _ in range(term.size)])


def _describe(config: RunConfig, policy: Policy, spec: EnvSpec, recorded: Obs, origin: Origin) -> Bundle:
    """Return the description of the bundle, without the hashes of its files."""
    assert isinstance(spec.action, Box)
    assert spec.arm is not None
    state = recorded["state"] / _state_scale(spec)
    ends = zip(spec.state_names, state.amin(0).tolist(), state.amax(0).tolist(), strict=True)
    return Bundle(
        format=FORMAT,
        origin=origin,
        state=spec.state,
        state_range=tuple(ObservedRange(*entry) for entry in ends),
        history=1,
        cameras=spec.cameras,
        instructions=spec.instructions,
        action_type=spec.arm.control,
        action=spec.action.terms,
        arm=spec.arm,
        robot=spec.robot,
        control_dt_s=spec.control_dt_s,
        max_episode_steps=spec.max_episode_steps,
        horizon=policy.horizon,
        execute=policy.execute,
        max_delay=config.max_delay,
        noise_shape=policy.plan_noise_shape,
        noise=config.runtime_config().eval_noise,
        files={},
        parity_tolerance=TOLERANCE,
        parity_max=0.0,
        notes=NOTES,
    )


def _metadata(spec: EnvSpec, origin: Origin) -> dict[str, str]:
    """Return the metadata of policy.onnx; keys and format (three decimals, commas) as mjlab's exporter writes them."""
    assert isinstance(spec.action, Box)
    assert spec.arm is not None
    joints = spec.arm.joints

    def csv(values: list[float]) -> str:
        return ",".join(f"{value:.3f}" for value in values)

    return {
        "run_path": origin.run,
        "joint_names": ",".join(joint.name for joint in joints),
        "joint_stiffness": csv([joint.stiffness for joint in joints]),
        "joint_damping": csv([joint.damping for joint in joints]),
        "default_joint_pos": csv([joint.home for joint in joints]),
        "command_names": "",
        "observation_names": ",".join(term.name for term in spec.state),
        "action_scale": csv([term.scale for term in spec.action.terms]),
    }
