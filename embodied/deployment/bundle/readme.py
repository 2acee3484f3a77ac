"""The texts of a bundle for people: its README.md and the notes in bundle.json."""

from embodied.deployment.bundle.description import Bundle
from embodied.deployment.bundle.runner import InputSpec

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
NOTES = (
    "state: give numbers in their unit, as measured. Do not multiply by scale: the model does it itself.",
    "actions: the output is in unit already. scale and offset only say its range, from offset - scale to offset + "
    "scale. Entries but the last are displacements from the measured pose, per control step.",
    "arm: rad, m, N m, N and seconds. A quaternion is (w, x, y, z). Poses are in the frame of the joint before.",
    "gripper: the last action is the target of each finger, the distance from the point where the fingers meet.",
    "noise: zeros plan deterministically; standard normals draw one of the policy's ways of acting.",
)
"""Notes on the entries of ``bundle.json``."""
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


def bundle_readme(bundle: Bundle) -> str:
    """Return the text, which tells a person how to run the bundle and what goes in and out."""
    origin, gripper = bundle.origin, bundle.arm.gripper
    success = "not evaluated" if origin.success_at_end is None else f"{origin.success_at_end:.1%}"
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
        f"| {joint.name} | {joint.kind} | {joint.low:.4f} | {joint.high:.4f} | {joint.max_velocity} | "
        f"{joint.stiffness:g} | {joint.damping:g} | {joint.home:.4f} |"
        for joint in bundle.arm.joints
    ]
    newline = "\n"
    return f"""\
# {origin.task}: {origin.policy} policy for {bundle.robot}

Trained for {origin.env_steps:,} control steps; success in simulation at the end of training: {success}.
Exported from `{origin.run}`, checkpoint `{origin.checkpoint}`.

## Run

```sh
{ONNX_RUN if bundle.layout == "onnx" else TORCH_RUN}
A chunk has {bundle.horizon} actions, {bundle.control_dt_s} s apart. Training executed {bundle.execute} of \
them before it planned again.

{newline.join(f"- {note}" for note in NOTES)}

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

Gripper: {gripper.open_m} m opens, {gripper.closed_m} m closes (distance of each finger from the centre).

## Joints

Positions in rad, of a slide in m; kp in N m/rad or N/m, kd in N m s/rad or N s/m.

| joint | kind | low | high | largest speed | kp | kd | default pose |
|---|---|---|---|---|---|---|---|
{newline.join(joints)}
"""
