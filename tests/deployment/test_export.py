"""Bundles: what is exported is what was trained, in physical units, and damage is noticed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from embodied import export
from embodied.core.arm import matrix_of
from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from embodied.core.user_files import sha256
from embodied.deployment.bundle.description import PARITY_FILE
from embodied.deployment.bundle.format import load_arrays, read_bundle
from embodied.deployment.bundle.runner import PolicyRunner, parity
from embodied.deployment.bundle.torch_policy import PhysicalPlan
from embodied.deployment.bundle.write import bundle_readme, check_exportable
from embodied.envs import make_pool, make_sampler
from embodied.policies.normalizer import RunningNormalizer
from embodied.runtime.checkpoint import Checkpoint
from embodied.session.deployed import exporting
from embodied.session.factories import make_spec
from tests.commands.helpers import SMALL as SMALL_RUN
from tests.commands.helpers import run, run_train
from tests.deployment.exports import flow_bundle, random_policy, small_config, write_small


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages of a logger."""
    messages: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keeping()
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


SMALL_VLA = {"task.max_episode_steps": 12, "policy.denoise_steps": 2, "policy.model.dit_config.num_hidden_layers": 2,
             "policy.model.vlm_config.text_config.num_hidden_layers": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "policy", "options"),
    [
        ("pick_place", "flow", {"policy.head_hidden": [16]}),
        ("push", "flow", {"policy.head_hidden": [16], "policy.horizon": 6, "policy.max_delay": 2}),
        ("reach", "gaussian", {"task.control.mode": "joint_delta"}),
        ("lift", "dsrl", {"policy.head_hidden": [16], "policy.noise_hidden": [16]}),
        pytest.param(
            "tabletop",
            "vla_tiny",
            SMALL_VLA,
            marks=[pytest.mark.slow(reason="exports a π0 of a million parameters"), pytest.mark.timeout(900)],
        ),
    ],
)
def test_the_runner_plans_what_the_policy_plans(
    tmp_path: Path, task: str, policy: str, options: dict[str, object]
) -> None:
    config = small_config(task, policy, **{"task.max_episode_steps": 40} | options)
    with logged("torch.onnx._internal.exporter._registration") as notes:
        bundle, trained = write_small(tmp_path / "bundle", config)
    assert [note for note in notes if "torchvision" in note] == []
    runner, spec = PolicyRunner(tmp_path / "bundle"), make_spec(config)
    assert parity(runner, tmp_path / "bundle") <= 1e-5
    recorded = exporting.record(config, trained, 2)  # other observations than those of the export
    rows = slice(-3, None)
    noise = torch.randn(3, *trained.plan_noise_shape)
    with torch.no_grad():
        chunk = trained.plan({key: value[rows] for key, value in recorded.items()}, noise).clamp(-1, 1)
    scale, offset = (torch.tensor([getattr(t, name) for t in spec.action.terms]) for name in ("scale", "offset"))
    state_scale = torch.tensor([t.scale for t in spec.state for _ in range(t.size)])
    inputs = {key: value[rows].numpy() for key, value in recorded.items()}
    inputs |= {"state": (recorded["state"][rows] / state_scale).numpy(), "noise": noise.numpy()}
    if bundle.max_delay:
        assert set(recorded["delay"].tolist()) == {0, 1, 2}
        inputs["prefix"] = (recorded["prefix"][rows] * scale + offset).numpy()
    inputs = {name: inputs[name] for name in runner.inputs.shapes}
    physical = runner.plan(inputs)
    assert physical.shape == (3, bundle.horizon, bundle.action_dim)
    np.testing.assert_allclose(physical, (chunk * scale + offset).numpy(), atol=1e-5 * scale.max().item())
    np.testing.assert_allclose(runner.plan({k: v[1:2] for k, v in inputs.items()}), physical[1:2], atol=1e-6)


def test_the_ranges_are_of_a_policy_with_the_noise_that_it_is_deployed_with() -> None:
    config = small_config("reach", "flow", **{"policy.head_hidden": [16], "task.max_episode_steps": 8})
    noisy = replace(config, runtime=replace(config.runtime, eval_noise="seeded"))
    policy = random_policy(config)
    quiet, found = exporting.record(config, policy, 2)["state"], exporting.record(noisy, policy, 2)["state"]
    assert torch.equal(quiet[:2], found[:2])
    assert not torch.equal(quiet, found)


def test_the_description_says_what_training_used() -> None:
    bundle, spec = read_bundle(flow_bundle()), make_spec(small_config("pick_place", "flow"))
    assert bundle.state == spec.state
    assert bundle.arm == spec.arm
    assert (bundle.control_dt_s, bundle.horizon, bundle.execute) == (0.05, 4, 4)
    assert [joint.name for joint in bundle.arm.joints] == [f"joint{i}" for i in range(1, 8)]
    assert bundle.arm.joints[0].max_velocity == 2.175
    assert bundle.arm.joints[4].stiffness == 100
    assert bundle.arm.gripper.open_m == 0.04
    assert [term.scale for term in bundle.action] == [0.06, 0.06, 0.06, 0.025]
    assert len(bundle.state_range) == bundle.state_dim == 40


def test_the_description_says_what_a_stranger_cannot_guess() -> None:
    bundle, readme = read_bundle(flow_bundle()), (flow_bundle() / "README.md").read_text(encoding="utf-8")
    meanings = {term.name: term.meaning for term in bundle.state}
    assert meanings["cube_rotation"] == "first two columns of the rotation matrix: x axis, then y axis of the object"
    assert all(term.meaning or term.difference for term in bundle.state)
    assert [term.scale for term in bundle.state if term.name == "fingers"] == [25.0]
    assert "Do not multiply by scale" in bundle.notes[0]
    assert set(readme.splitlines()) >= {f"- {note}" for note in bundle.notes}
    for meaning in meanings.values():
        assert meaning in readme


def test_gradient_updates_are_not_called_control_steps(tmp_path: Path) -> None:
    found = Checkpoint(tmp_path / "step_1778", 1778, {})
    for options, steps in (({}, 1778), ({"algo": "sft", "data": "demos"}, 0)):
        origin = exporting.origin_of(small_config("reach", "flow", **options), tmp_path, found)
        assert (origin.env_steps, origin.checkpoint) == (steps, "step_1778")
        readme = bundle_readme(replace(read_bundle(flow_bundle()), origin=origin))
        assert ("Trained for 1,778 control steps" in readme) == bool(steps)
        assert ("Trained by supervised learning alone;" in readme) != bool(steps)


def test_a_rotation_is_the_first_two_columns_of_its_matrix() -> None:
    pool = make_pool("lift", {}, num_envs=4, num_threads=1)
    obs = pool.reset(make_sampler(pool, seed=0))
    first = 7 + 7 + 2 + 1 + 3 + 3 + 3 + 3
    assert pool.spec.state_names[first] == "cube_rotation[0]"
    for state, pose in zip(obs["state"].numpy(), pool.view.body_qpos("cube").numpy(), strict=True):
        np.testing.assert_allclose(state[first : first + 6], matrix_of(pose[3:])[:, :2].T.ravel(), atol=1e-6)


def test_the_model_has_the_metadata_that_mjlab_writes() -> None:
    model = onnx.load(str(flow_bundle() / "policy.onnx"))
    found = {entry.key: entry.value for entry in model.metadata_props}
    assert found["joint_names"] == "joint1,joint2,joint3,joint4,joint5,joint6,joint7"
    assert found["joint_stiffness"].split(",")[0] == "1000.000"
    assert found["action_scale"] == "0.060,0.060,0.060,0.025"
    assert found["observation_names"].startswith("joint_pos,joint_vel,fingers")


def test_an_export_whose_outputs_differ_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    assert run_train(*SMALL_RUN, "total_steps=64", f"out={run_dir}").code == 0
    forward = PhysicalPlan.forward

    def wrong_after_export(self: PhysicalPlan, *inputs: torch.Tensor) -> torch.Tensor:
        chunk = forward(self, *inputs)
        return chunk if torch.compiler.is_exporting() else chunk + 2e-5 * self.action_scale

    monkeypatch.setattr(PhysicalPlan, "forward", wrong_after_export)
    outcome = run(export.main, [f"run={run_dir}", f"out={tmp_path / 'bundle'}"])
    assert outcome.code == 2
    assert "differ by" in outcome.stderr
    assert "1e-05" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command_exports_a_run(trained_reach: Path, tmp_path: Path) -> None:
    outcome = run(export.main, [f"run={trained_reach}", f"out={tmp_path / 'a' / 'bundle'}", "episodes=2"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["parity_max"] <= 1e-5
    bundle = read_bundle(tmp_path / "a" / "bundle")
    assert (bundle.origin.task, bundle.origin.policy, bundle.robot) == ("reach", "gaussian", "franka_panda")
    assert "joint_pos" in (tmp_path / "a" / "bundle" / "README.md").read_text()
    assert outcome.result["sha256"] == sha256(tmp_path / "a" / "bundle" / "bundle.json")
    again = run(export.main, [f"run={trained_reach}", f"out={tmp_path / 'a' / 'bundle'}"])
    assert again.code == 2
    assert "exists" in again.stderr


@pytest.fixture(scope="module")
def trained_reach(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "reach"
    assert run_train(*SMALL_RUN, "total_steps=640", f"out={run_dir}").code == 0
    return run_dir


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("reach", r"embodied\.tasks check=reach says what it lacks$"),
        (
            "gym/Reach-v0",
            r"A bundle needs the kinematics and limits of an arm, which the spec of a family can describe$",
        ),
    ],
)
def test_a_task_that_describes_no_arm_is_refused_with_what_is_missing(task: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        check_exportable(EnvSpec.of_sizes(task, state=3, action=2))


def test_a_missing_file_and_a_changed_file_are_refused(bundle_dir: Path) -> None:
    (bundle_dir / PARITY_FILE).unlink()
    with pytest.raises(UserError, match=r"lacks parity.npz: copy the whole directory"):
        PolicyRunner(bundle_dir)
    shutil.copy(flow_bundle() / PARITY_FILE, bundle_dir)
    with (bundle_dir / "policy.onnx").open("r+b") as file:
        file.seek(1000)
        file.write(b"\x00\x01")
    with pytest.raises(UserError, match=r"policy.onnx is not the file that was exported"):
        PolicyRunner(bundle_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=1), "format 1, this version reads 2"),
        (lambda d: d.pop("arm"), "lacks arm"),
        (lambda d: d.update(arms=1), "has unknown arms"),
        (lambda d: d.update(horizon="4"), r"horizon: got '4', allowed: an integer"),
        (lambda d: d["arm"]["joints"][0].update(low=None), r"arm.joints\[0\].low: got null, allowed: a number"),
        (lambda d: d["files"].update({"../x": "0"}), "got '../x', which no bundle of this layout has"),
        (lambda d: d["arm"].update(control="ee"), "allowed: ee_delta, joint_delta"),
    ],
)
def test_a_malformed_description_is_refused(bundle_dir: Path, change: object, message: str) -> None:
    path = bundle_dir / "bundle.json"
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        read_bundle(bundle_dir)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no bundle.json"):
        read_bundle(tmp_path)
    (tmp_path / "bundle.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        read_bundle(tmp_path)


# -- inputs of the runner ----------------------------------------------------------------------------------------------
@pytest.fixture
def inputs() -> dict[str, np.ndarray]:
    arrays = load_arrays(flow_bundle() / PARITY_FILE)
    return {name: arrays[name][:2].copy() for name in ("state", "noise")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("noise"), "lacks noise"),
        (lambda i: i.update(stat=i.pop("state")), "unknown input 'stat'. Did you mean 'state'"),
        (lambda i: i.update(state=i["state"].astype(np.float64)), r"state: got float64 \[2, 40\], needed float32"),
        (lambda i: i.update(state=i["state"][:, :39]), r"needed float32 \['N', 40\]"),
        (lambda i: i.update(noise=i["noise"][:1]), "same N"),
        (lambda i: i["state"].__setitem__((0, 3), np.nan), "NaN"),
        (
            lambda i: i["state"].__setitem__((1, 3), -112.5),
            r"joint_pos\[3\] is -112.5, training saw .* rad: check unit",
        ),
        (lambda i: i["state"].__setitem__((1, slice(17, 20)), [600, 0, 200]), r"tcp_pos\[0\] is 600"),
        (lambda i: i["state"].__setitem__((0, slice(0, 7)), i["state"][0, [5, 1, 2, 3, 4, 0, 6]] * 4), "check unit"),
    ],
)
def test_wrong_observations_are_refused(
    runner: PolicyRunner, inputs: dict[str, np.ndarray], change: object, message: str
) -> None:
    change(inputs)  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        runner.plan(inputs)


def test_an_observation_far_from_0_is_normalised_in_float32_as_exactly_in_onnx(tmp_path: Path) -> None:
    state = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.0, 12_345.678])
    normalizer = RunningNormalizer(2)
    normalizer.update(state)
    torch.onnx.export(normalizer.eval(), (state,), str(tmp_path / "normalizer.onnx"), dynamo=True, verbose=False)
    model = onnx.load(tmp_path / "normalizer.onnx")
    assert {weight.data_type for weight in model.graph.initializer} <= {onnx.TensorProto.FLOAT}
    (found,) = onnxruntime.InferenceSession(tmp_path / "normalizer.onnx").run(None, {"x": state.numpy()})
    exact = (state.double() - normalizer.mean) / normalizer.var.sqrt()
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
