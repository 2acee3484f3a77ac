"""Write a bundle (embodied.deployment.bundle.format) from a policy and observations that were recorded with it.

policy, observations ──► model, ranges, outputs of torch ──► files

embodied.session.deployed.exporting then compares the outputs of the bundle's runner with those of torch.
"""

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import Arms, Box, EnvSpec, joints_of
from embodied.core.types import Obs
from embodied.core.user_files import sha256
from embodied.deployment.bundle.description import (
    PARITY_FILE,
    POLICY_FILE,
    README_FILE,
    SIMULATION_FILE,
    Bundle,
    ObservedRange,
    Origin,
)
from embodied.deployment.bundle.format import FORMAT, write_description
from embodied.deployment.bundle.runner import OUTPUT_PREFIX, InputSpec
from embodied.deployment.bundle.torch_policy import PhysicalPlan, write_model

TOLERANCE = 1e-5  # largest allowed difference between torch and ONNX Runtime, in units of the action's scale
PARITY_ROWS = 64
MAX_ONNX_BYTES = 2**30  # largest weights that are exported as ONNX, float32; a file can have 2 GB
ONNX_RUN = """\
python -m embodied.deploy bundle=<this directory> robot=sim    # the simulated arm, in real time
python -m embodied.serve bundle=<this directory> port=8000     # a policy server, openpi's protocol
```

In your own program, which needs numpy and onnxruntime alone:

```python
from pathlib import Path
from embodied.deployment.bundle.runner import PolicyRunner

runner = PolicyRunner(Path("<this directory>"))
chunk = runner.plan(inputs)  # arrays by name, N rows each ─► [N, H, A], physical units
```
"""
TORCH_RUN = """\
python -m embodied.serve bundle=<this directory> port=8000     # needs torch and transformers; device=cuda for a GPU
python -m embodied.deploy bundle=<this directory> robot=sim server=ws://127.0.0.1:8000
```

The robot's computer needs `bundle.json`, `parity.npz`, `simulation.json` and `README.md` of this directory alone.

In your own program:

```python
from pathlib import Path
from embodied.session.torch_runner import TorchRunner
from transformers import PI0ForConditionalGeneration

runner = TorchRunner(Path("<this directory>"))
chunk = runner.plan(inputs)  # arrays by name, N rows each ─► [N, H, A], physical units
model = PI0ForConditionalGeneration.from_pretrained("<this directory>")  # the model without its normaliser
```
"""


@dataclass(frozen=True)
class Source:
    """What a bundle is written from."""

    policy: Policy
    spec: EnvSpec
    """The policy with its trained weights, and the spec of the environment that it was trained in."""
    recorded: Obs
    """Observations of its decisions, as the environment gives them, [F, ...]."""
    origin: Origin
    policy_section: Mapping[str, Any]
    simulation: Mapping[str, Any]
    noise: Literal["zero", "seeded"] = "zero"
    max_delay: int = 0
    """Largest inference delay that the policy was trained for, control steps."""
    seed: int = 0
    """Seed of the recorded rows and their noise."""


def check_exportable(spec: EnvSpec, robot: str = "") -> None:
    """Raise UserError unless a robot's computer can execute the policy's actions. robot: value of ``task.robot``."""
    if not isinstance(spec.action, Box):
        raise UserError(f"task {spec.task} has choices for actions: only continuous actions can be exported")
    if spec.arm is None:
        if "/" in spec.task:  # of another simulator
            needed = "the kinematics and limits of an arm, which the spec of a family can describe"
            raise UserError(f"task {spec.task} describes no arm (EnvSpec.arm). A bundle needs {needed}")
        unknown = f"the arm of its robot '{spec.robot}' (EnvSpec.arm): its kinematics and limits are unknown"
        words = f"check={spec.task}{f' task.robot={robot}' if robot else ''}"
        raise UserError(f"task {spec.task} does not describe {unknown}. embodied.tasks {words} says what it lacks")


def chosen_layout(policy: Policy, layout: str = "auto") -> str:
    """Return ``onnx`` or ``transformers``; ``auto`` is ONNX unless the weights are too large for one file."""
    if layout != "auto":
        return layout
    size = 4 * sum(weight.numel() for weight in policy.parameters())
    return policy.library if policy.library is not None and size > MAX_ONNX_BYTES else "onnx"


def write_bundle(path: Path, source: Source, layout: str = "onnx") -> Bundle:
    """Write all files of a bundle into an empty directory; return its description. No runner has been compared yet."""
    policy, bundle = source.policy, _describe(source)
    plan = PhysicalPlan(policy.eval(), source.spec, (*source.recorded, "noise"))
    inputs = _inputs(source, plan)
    if layout == "onnx":
        export_onnx(plan, tuple(value[:3] for value in inputs.values()), path / POLICY_FILE, _metadata(bundle))
    else:
        write_model(path, policy, source.policy_section)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    with torch.no_grad():
        arrays[f"{OUTPUT_PREFIX}actions"] = plan(*inputs.values()).numpy()
    np.savez(path / PARITY_FILE, **arrays)  # type: ignore[arg-type]  # keys are names of arrays
    (path / SIMULATION_FILE).write_text(json.dumps(source.simulation, indent=1) + "\n", encoding="utf-8")
    bundle = replace(bundle, files={file.name: sha256(file) for file in sorted(path.iterdir())})
    (path / README_FILE).write_text(bundle_readme(bundle), encoding="utf-8")
    bundle = replace(bundle, files=bundle.files | {README_FILE: sha256(path / README_FILE)})
    write_description(path, bundle)
    return bundle


def _inputs(source: Source, plan: PhysicalPlan) -> dict[str, Tensor]:
    """Return rows of recorded observations as inputs of the exported model: physical units; half have noise 0."""
    generator = torch.Generator().manual_seed(source.seed)
    rows = torch.randperm(len(source.recorded["state"]), generator=generator)[:PARITY_ROWS]
    inputs = {key: value[rows] for key, value in source.recorded.items()}
    noise = torch.randn(len(rows), *source.policy.plan_noise_shape, generator=generator)
    noise[::2] = 0.0
    inputs |= {"state": inputs["state"] / plan.state_scale, "noise": noise}
    if "prefix" in inputs:
        inputs["prefix"] = inputs["prefix"] * plan.action_scale + plan.action_offset
    return inputs


def export_onnx(plan: PhysicalPlan, args: tuple[Tensor, ...], path: Path, metadata: Mapping[str, str]) -> None:
    """Write ``plan`` to ``path``. args: two or more rows of every input; the number of rows stays free."""
    rows = torch.export.Dim("rows", min=1, max=4096)
    logging.disable(logging.WARNING)  # torch notes that it skips the operators of torchvision, onnxscript what it folds
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                plan.eval(), args, input_names=list(plan.names), output_names=["actions"],
                dynamic_shapes=(tuple({0: rows} for _ in args),), dynamo=True, verbose=False,
            )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    program.model.metadata_props.update(metadata)
    program.save(str(path), external_data=False)


def _describe(source: Source) -> Bundle:
    """Return the description of the bundle, without the hashes of its files."""
    spec, policy = source.spec, source.policy
    assert spec.arm is not None
    assert isinstance(spec.action, Box)
    state = source.recorded["state"] / torch.from_numpy(spec.state_scale)
    ends = zip(spec.state_names, state.amin(0).tolist(), state.amax(0).tolist(), strict=True)
    return Bundle(
        format=FORMAT, origin=source.origin, files={}, notes=notes_of(spec.arms), parity_tolerance=TOLERANCE,
        parity_max=0.0, history=1, cameras=spec.cameras,
        state=spec.state, state_range=tuple(ObservedRange(*entry) for entry in ends),
        instructions=spec.instructions, action_type=spec.arm.control, action=spec.action.terms, arm=spec.arm,
        right_arm=spec.right_arm,
        robot=spec.robot, control_dt_s=spec.control_dt_s, max_episode_steps=spec.max_episode_steps,
        horizon=policy.horizon, execute=policy.execute, max_delay=source.max_delay,
        noise_shape=policy.plan_noise_shape, noise=source.noise,
    )  # fmt: skip


def notes_of(arms: Arms) -> tuple[str, ...]:
    """Return the notes on the entries of ``bundle.json``."""
    arm, two = next(iter(arms.values())), len(arms) > 1
    pose = "pose of the last targets, which begin as the measured one" if arm.from_target else "measured pose"
    meet, turn = "the distance from the point where the fingers meet", "the position of the joint that turns it, rad"
    what, of = meet if arm.gripper.position_unit == "m" else turn, " of each arm" if two else ""
    both = ("arms: names that begin with left_ are of arm, those with right_ of right_arm, in one frame.",)
    return (
        "state: give numbers in their unit, as measured. Do not multiply by scale: the model does it itself.",
        "actions: the output is in unit already. scale and offset only say its range, from offset - scale to offset + "
        f"scale. Entries but the last{of} are displacements from the {pose}, per control step.",
        "arm: rad, m, N m, N and seconds. A quaternion is (w, x, y, z). Poses are in the frame of the joint before.",
        f"gripper: the last action{of} is the target of each finger, {what}.",
        "noise: zeros plan deterministically; standard normals draw one of the policy's ways of acting.",
        *(both if two else ()),
    )


def _metadata(bundle: Bundle) -> dict[str, str]:
    """Return the metadata of policy.onnx; keys and format (three decimals, commas) as mjlab's exporter writes them."""
    joints = joints_of(bundle.arms)
    numbers = {
        "joint_stiffness": [joint.stiffness for joint in joints.values()],
        "joint_damping": [joint.damping for joint in joints.values()],
        "default_joint_pos": [joint.home for joint in joints.values()],
        "action_scale": [term.scale for term in bundle.action],
    }
    return {
        "run_path": bundle.origin.run,
        "command_names": "",
        "joint_names": ",".join(joints),
        "observation_names": ",".join(term.name for term in bundle.state),
        **{name: ",".join(f"{value:.3f}" for value in values) for name, values in numbers.items()},
    }


def bundle_readme(bundle: Bundle) -> str:
    """Return the text, which tells a person how to run the bundle and what goes in and out."""
    origin, gripper = bundle.origin, bundle.arm.gripper
    success = "not evaluated" if origin.success_at_end is None else f"{origin.success_at_end:.1%}"
    how = f"for {origin.env_steps:,} control steps" if origin.env_steps else "by supervised learning alone"
    others = ", ".join(f"`{name}`" for name in InputSpec(bundle).shapes if name != "state")
    state, first = [], 0
    for term in bundle.state:
        ranges = bundle.state_range[first : first + term.size]
        low, high = min(entry.low for entry in ranges), max(entry.high for entry in ranges)
        source = term.source if term.difference is None else f"{term.difference.of} - {term.difference.minus}"
        entries = f"{first} to {first + term.size - 1}"
        cells = entries, term.name, term.meaning or "-", term.unit or "-", term.frame or "-", source
        state.append(f"| {' | '.join(cells)} | {low:.3g} to {high:.3g} |")
        first += term.size
    actions = []
    for i, action in enumerate(bundle.action):
        low, high = sorted((action.offset - action.scale, action.offset + action.scale))
        actions.append(f"| {i} | {action.name} | {action.meaning} | {action.unit} | {low:.4g} to {high:.4g} |")
    joints = [
        f"| {name} | {joint.kind} | {joint.low:.4f} | {joint.high:.4f} | {joint.max_velocity} | "
        f"{joint.stiffness:g} | {joint.damping:g} | {joint.home:.4f} |"
        for name, joint in joints_of(bundle.arms).items()
    ]
    newline, unit = "\n", gripper.position_unit
    finger = "distance of each finger from the centre" if unit == "m" else "position of the joint that turns it"
    return f"""\
# {origin.task}: {origin.policy} policy for {bundle.robot}

Trained {how}; success in simulation at the end of training: {success}.
Exported from `{origin.run}`, checkpoint `{origin.checkpoint}`.

## Run

```sh
{ONNX_RUN if bundle.layout == "onnx" else TORCH_RUN}
A chunk has {bundle.horizon} actions, {bundle.control_dt_s} s apart. Training executed {bundle.execute} of \
them before it planned again.

{newline.join(f"- {note}" for note in bundle.notes)}

## Input `state`

| entries | term | meaning | unit | frame | from | recorded range |
|---|---|---|---|---|---|---|
{newline.join(state)}

Other inputs: {others} (see `bundle.json`).
`noise` has the shape [N, {", ".join(map(str, bundle.noise_shape))}]; zeros plan deterministically.

## Output `actions`

| entry | name | meaning | unit | range |
|---|---|---|---|---|
{newline.join(actions)}

Gripper: {gripper.open_m} {unit} opens, {gripper.closed_m} {unit} closes ({finger}).

## Joints

Positions in rad, of a slide in m; kp in N m/rad or N/m, kd in N m s/rad or N s/m.

| joint | kind | low | high | largest speed | kp | kd | default pose |
|---|---|---|---|---|---|---|---|
{newline.join(joints)}
"""
