"""LeRobotDatasets of joint positions: converted to states and actions of a task, and refused with what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from embodied import convert
from embodied.core.episodes import PlanList
from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Box, EnvSpec, Term, joints_of
from embodied.data import Demonstrations, Episode, read, write
from embodied.data.images import center_crop
from embodied.data.lerobot import check_fits, read_features
from embodied.deployment.control.arm import StateBuilder
from embodied.deployment.robots.base import joint_names
from embodied.deployment.robots.mapping import gripper_entry
from embodied.envs.episodes.sampler import first_episodes
from embodied.session.config import compose_run
from embodied.session.deployed.joint_dataset import draft_mapping, resampled, times
from embodied.session.factories import make_env, make_spec
from tests.commands.helpers import run

TASK = ["task=pick_place", "task.robot=so101"]
DEG = "unit=deg"
STEPS = 30
EXTERNAL = "observation.environment_state"


class Recorded(NamedTuple):
    """A data set as LeRobot records it, and what the simulation had meanwhile."""

    path: Path
    names: list[str]
    state_FS: torch.Tensor
    action_FA: torch.Tensor
    """Of the simulation, whose actions displaced the joints."""
    spec: EnvSpec


def as_lerobot(path: Path, names: list[str], positions: list[Any], targets: list[Any], more: Mapping[str, Any]) -> None:
    """Write episodes of positions and targets [L, J + 1] with the names of a data set of LeRobot.

    more: further columns by name, each the names of its entries and the numbers of each episode.
    """
    spec = EnvSpec("teleop", tuple(Term(n, 1) for n in names), Box(tuple(map(ActionTerm, names))), 0.05, 100)
    episodes = [
        Episode(
            torch.as_tensor(at).float(), torch.as_tensor(to).float(), torch.zeros(len(at)),
            torch.arange(len(at)) == len(at) - 1, "put the cube away",
            {"front": torch.full((len(at), 24, 32, 3), i, dtype=torch.uint8)},
            {name: torch.as_tensor(values[i]).float() for name, (_, values) in more.items()},
        )
        for i, (at, to) in enumerate(zip(positions, targets, strict=True))
    ]  # fmt: skip
    write(path, episodes, spec)
    info = json.loads((path / "meta" / "info.json").read_text())
    for name, entries in {"observation.state": names, **{name: entries for name, (entries, _) in more.items()}}.items():
        info["features"][name]["names"] = entries
    (path / "meta" / "info.json").write_text(json.dumps(info))
    (path / "meta" / "units.json").unlink()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Four episodes of the scripted expert, whose actions displace the joints."""
    config = compose_run({"task": "pick_place", "task.robot": "so101", "task.control.mode": "joint_delta"})
    env: Any = make_env(config, 4, 1)
    arm, spec = env.spec.arm, env.spec
    grip = gripper_entry(arm, "gripper.pos")

    def numbers(joints: torch.Tensor, finger: torch.Tensor) -> np.ndarray:
        return np.column_stack([np.degrees(joints.numpy()), (finger.numpy() - grip.zero) / grip.factor])

    plans = first_episodes(spec, 4, 7)
    states, actions, positions, targets = [env.reset(PlanList(plans, 4))["state"]], [], [], []
    for _ in range(STEPS):
        positions.append(numbers(env.arm.joint_pos, env.arm.gripper_pos[:, 0]))
        actions.append(env.expert())
        states.append(env.step(actions[-1]).obs["state"])
        targets.append(numbers(env.arm.joint_targets(), env.arm.finger_targets[:, 0]))
    env.close()
    names = [f"{joint.name}.pos" for joint in arm.joints] + ["gripper.pos"]
    path = tmp_path_factory.mktemp("joints") / "teleop"
    state_NLS = torch.stack(states[:-1], 1)
    external_names = StateBuilder(spec).external_names
    places = [spec.state_names.index(name) for name in external_names]
    external = external_names, [*(state_NLS / torch.from_numpy(spec.state_scale))[..., places]]
    as_lerobot(path, names, [*np.stack(positions, 1)], [*np.stack(targets, 1)], {EXTERNAL: external})
    return Recorded(path, names, state_NLS.flatten(0, 1), torch.stack(actions, 1).flatten(0, 1), spec)


def converted(source: Path, out: Path, *words: str) -> Demonstrations:
    units = [] if any(word.startswith(("unit", "mapping")) for word in words) else [DEG]
    outcome = run(convert.main, [f"source={source}", f"out={out}", *TASK, *units, *words])
    assert outcome.code == 0, outcome.stderr
    return read(out)


def test_states_and_actions_are_those_of_the_simulation(recorded: Recorded, tmp_path: Path) -> None:
    """All of the state but velocities, which are differences of positions and so are late or early by half a step."""
    data = converted(recorded.path, tmp_path / "set", "task.control.mode=joint_delta")
    assert (data.state_names, data.control_hz) == (recorded.spec.state_names, 20.0)
    velocity = torch.tensor([name.split("[")[0] in ("joint_vel", "tcp_vel") for name in data.state_names])
    torch.testing.assert_close(data.state_FS[:, ~velocity], recorded.state_FS[:, ~velocity], atol=2e-4, rtol=1e-4)
    near = torch.corrcoef(torch.stack([data.state_FS[:, 5], recorded.state_FS[:, 5]]))[0, 1]
    assert near > 0.9, "velocity of the first joint"
    torch.testing.assert_close(data.action_FA[:, :-1], recorded.action_FA[:, :-1], atol=2e-4, rtol=0)
    assert data.instructions == ("put the cube away",)


def test_longer_episodes_than_the_time_limit_are_named(recorded: Recorded, tmp_path: Path) -> None:
    words = [f"source={recorded.path}", f"out={tmp_path / 'set'}", *TASK, DEG, "task.max_episode_steps=20"]
    assert "time limit is 20: task.max_episode_steps=30 gives" in run(convert.main, words).stderr


def test_displacements_of_the_tool_lead_to_the_recorded_targets(recorded: Recorded, tmp_path: Path) -> None:
    words = [f"source={recorded.path}", f"out={tmp_path / 'set'}", *TASK, DEG]
    outcome = run(convert.main, words)
    assert outcome.code == 0, outcome.stderr
    line = next(line for line in outcome.stderr.splitlines() if line.startswith("actions ask for a tool "))
    average, largest, angle_deg = map(float, re.findall(r"([\d.]+) (?:mm|deg)", line))
    assert average < 2
    assert largest < 15
    assert angle_deg < 25
    recorded_with = json.loads((tmp_path / "set" / "meta" / "recorded_with.json").read_text())
    assert recorded_with == {"task": "pick_place", "task.robot": "so101"}


@pytest.mark.parametrize("unit", ["rad", "percent"])
def test_other_units_give_the_same(recorded: Recorded, unit: str, tmp_path: Path) -> None:
    data, arm = read(recorded.path), recorded.spec.arm
    assert arm is not None
    factor, zero = torch.ones(6), torch.zeros(6)
    for i, joint in enumerate(arm.joints):
        factor[i] = np.pi / 180
        if unit == "percent":
            factor[i] *= 200 / (joint.high - joint.low)
            zero[i] = -100 * (joint.high + joint.low) / (joint.high - joint.low)
    parts = [(zero + factor * values).view(4, STEPS, 6) for values in (data.state_FS, data.action_FA)]
    external = read_features(recorded.path, [EXTERNAL])[EXTERNAL].view(4, STEPS, -1)
    names = json.loads((recorded.path / "meta" / "info.json").read_text())["features"][EXTERNAL]["names"]
    as_lerobot(tmp_path / "other", recorded.names, [*parts[0]], [*parts[1]], {EXTERNAL: (names, [*external])})
    here = converted(tmp_path / "other", tmp_path / "here", f"unit={unit}")
    there = converted(recorded.path, tmp_path / "there")
    torch.testing.assert_close(here.state_FS, there.state_FS, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(here.action_FA, there.action_FA, atol=1e-2, rtol=0)


def test_a_mapping_renames_and_turns(recorded: Recorded, tmp_path: Path) -> None:
    data, arm = read(recorded.path), recorded.spec.arm
    assert arm is not None
    there = converted(recorded.path, tmp_path / "there", "cameras=[front]")
    renamed = [f"m{i}" for i in range(6)]
    sign = torch.tensor([-1.0, 1, 1, 1, 1, 1])
    parts = [[*(sign * values).view(4, STEPS, 6)] for values in (data.state_FS, data.action_FA)]
    as_lerobot(tmp_path / "other", renamed, *parts, {})
    entries = {joint.name: {"name": f"m{i}", "unit": "deg", "sign": -1 if i == 0 else 1, "offset": 0.0, "low": None,
                            "high": None, "velocity": None} for i, joint in enumerate(arm.joints)}  # fmt: skip
    low, high = arm.gripper.closed_m, arm.gripper.max_position_m
    gripper = {**entries[arm.joints[1].name], "name": "m5", "unit": "percent", "low": low, "high": high}
    cameras, external = {"wrist": "front"}, {}
    mapping = {"robot": "mine", "joints": entries, "gripper": gripper, "external": external, "cameras": cameras}
    (tmp_path / "mapping.json").write_text(json.dumps({**mapping, "confirmed": None}))
    here = converted(tmp_path / "other", tmp_path / "here", "cameras=[wrist]", f"mapping={tmp_path / 'mapping.json'}")
    assert read(tmp_path / "here", cameras=["wrist"]).images["wrist"].shape == (4 * STEPS, 64, 64, 3)
    torch.testing.assert_close(here.state_FS, there.state_FS)
    torch.testing.assert_close(here.action_FA, there.action_FA)


def test_with_cameras_images_take_the_place_of_objects(recorded: Recorded, tmp_path: Path) -> None:
    converted(recorded.path, tmp_path / "set", "cameras=[front]", "image_size=12", "instruction=go")
    data = read(tmp_path / "set", cameras=["front"])
    assert not any("cube" in name for name in data.state_names)
    assert data.instructions == ("go",)
    assert data.images["front"].shape == (4 * STEPS, 12, 12, 3)
    assert data.images["front"][:: 2 * STEPS, 0, 0, 0].tolist() == [0, 2]


def test_the_middle_of_an_image_is_kept() -> None:
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, 2:6] = 100
    assert (center_crop(wide, 2) == 100).all()
    assert center_crop(wide, None) is wide


def test_thirty_frames_a_second_become_twenty_control_steps() -> None:
    at_L, frame_L = times(31, 30.0, 0.05)
    assert (len(at_L), frame_L[:4].tolist()) == (21, [0, 1, 3, 4])
    ramp = np.arange(31)[:, None] / 30 * np.array([[1.0, 2.0]])
    found = resampled(ramp, ramp + 1, 1, {"x": ramp[:, 0]}, 30.0, at_L, 0.05)
    np.testing.assert_allclose(found.qpos_LJ[:, 0], at_L)
    np.testing.assert_allclose(found.qvel_LJ[:, 0], 1.0)
    np.testing.assert_allclose(found.fingers_LG[:, 0], 2 * at_L)
    np.testing.assert_allclose(found.external["x"], at_L)
    np.testing.assert_allclose(found.target_LJ[:, 0], 1 + (at_L + 0.05 - 1 / 30).clip(max=1.0))


@pytest.mark.parametrize("hz", [10.0, 20.0, 60.0])
def test_the_targets_of_every_rate_move_as_fast(hz: float) -> None:
    """Each frame's target is the next frame's position, and so is that of each control step."""
    frames = int(2 * hz)
    ramp = np.arange(frames + 1)[:, None] / hz * np.ones((1, 2))
    at_L, _ = times(frames, hz, 0.05)
    found = resampled(ramp[:-1], ramp[1:], 1, {}, hz, at_L, 0.05)
    np.testing.assert_allclose(found.target_LJ[1:-1, 0], at_L[1:-1] + 0.05)


def test_an_episode_of_one_frame_is_converted(recorded: Recorded, tmp_path: Path) -> None:
    data = read(recorded.path)
    parts = [[values[:1], values[:5]] for values in (data.state_FS, data.action_FA)]
    as_lerobot(tmp_path / "short", recorded.names, *parts, {})
    assert converted(tmp_path / "short", tmp_path / "set", "cameras=[front]").episode_F.tolist() == [0] + [1] * 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["unit=rad"], "shoulder_pan.pos from"),
        (["task.robot=panda"], "needed: joint1.pos, joint2.pos, joint3.pos, joint4.pos, joint5.pos"),
        (["task=lift_bar"], "left_joint1.pos, left_joint2.pos"),
        (["unit=null"], "got neither unit nor mapping, needed: unit=deg"),
        (["mapping=x.json"], "got both unit and mapping"),
        (["bundle=x"], "bundle: only for the episodes of a deployment"),
        (["cameras=[front,front]"], "each once"),
        (["task=stack"], "no column has base_pos[0], base_pos[1]"),
        (["cameras=[wrist]"], "it lacks observation.images.wrist"),
        (["task=gym/CartPole-v1"], "has no arm whose joints are known"),
        (["unit=degree"], "unit: got 'degree', allowed: 'deg', 'rad' or 'percent'"),
        (["algo.gamma=0.9"], "unknown key 'algo.gamma'"),
        (["unit=null", "mapping=none.json"], "mapping=none.json is not a file"),
    ],
)
def test_bad_input_is_one_line(recorded: Recorded, words: list[str], message: str, tmp_path: Path) -> None:
    given = {word.partition("=")[0]: word for word in [*TASK, DEG, *words]}
    if given["task"].endswith(("CartPole-v1", "lift_bar")):
        del given["task.robot"]
    outcome = run(convert.main, [f"source={recorded.path}", f"out={tmp_path / 'set'}", *given.values()])
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: at * torch.tensor([*[0.0175] * 5, 1]),
            "all joints read as degrees are within 6.28 degrees: give unit=rad",
        ),
        (lambda at: at * torch.tensor([1, 1, 1, 1, 1, 0.01]), "does it run from 0 to 1?"),
        (lambda at: at * torch.tensor([1, 1, 1, 1, 1, 9.0]), "gripper.pos from"),
        (lambda at: at * 4, "and the task's arm has"),
    ],
)
def test_numbers_in_other_units_are_refused(
    recorded: Recorded, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    data = read(recorded.path)
    parts = [[*change(values).view(4, STEPS, 6)] for values in (data.state_FS, data.action_FA)]
    as_lerobot(tmp_path / "other", recorded.names, *parts, {})
    outcome = run(
        convert.main, [f"source={tmp_path / 'other'}", f"out={tmp_path / 'x'}", *TASK, DEG, "cameras=[front]"]
    )
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr


def test_a_draft_of_a_mapping_can_be_changed(recorded: Recorded, tmp_path: Path) -> None:
    """Its signs and zeros are those of the data set; others lead the tool under the table or past the cube."""
    file, words = tmp_path / "mapping.json", [f"source={recorded.path}", *TASK, "task.control.mode=joint_delta"]
    drafted = run(convert.main, [*words, DEG, f"mapping={file}", "propose_mapping=true", f"out={tmp_path / 'a'}"])
    assert drafted.code == 0, drafted.stderr
    assert "does not say which episodes" not in drafted.stderr
    assert "is a unit, a sign or a zero" not in drafted.stderr
    again = run(convert.main, [*words, f"mapping={file}", f"out={tmp_path / 'b'}"])
    assert again.code == 0, again.stderr
    torch.testing.assert_close(read(tmp_path / "a").action_FA, read(tmp_path / "b").action_FA, rtol=0, atol=0)
    for joint, wrong_entry, line in (
        ("elbow_flex", {"sign": -1}, "m high, and in"),
        ("shoulder_pan", {"offset": 0.6}, "the tool comes as near as"),
    ):
        mapping = json.loads(file.read_text())
        mapping["joints"][joint] |= wrong_entry
        (tmp_path / "wrong.json").write_text(json.dumps(mapping))
        wrong = run(convert.main, [*words, f"mapping={tmp_path / 'wrong.json'}", f"out={tmp_path / joint}"])
        (found,) = [told for told in wrong.stderr.splitlines() if line in told]
        assert "is a unit, a sign or a zero of the joints wrong" in found
    refused = run(convert.main, [*words, DEG, f"mapping={file}", "propose_mapping=true", f"out={tmp_path / 'c'}"])
    assert "propose_mapping=true needs unit=, and mapping=<a new file>" in refused.stderr


def test_what_does_not_fit_says_what_to_do(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"joint positions: python -m embodied\.convert makes a data set"):
        check_fits(read(recorded.path), recorded.spec, recorded.path)
    with_images = converted(recorded.path, tmp_path / "set", "task.control.mode=joint_delta", "cameras=[front]")
    with pytest.raises(UserError, match=r"of a policy with cameras: give policy=gaussian policy\.cameras=\[front\]"):
        check_fits(with_images, recorded.spec, tmp_path / "set")


def test_names_that_fit_in_part_are_refused(recorded: Recorded) -> None:
    """By their order they would be other joints."""
    names, arms = recorded.names, recorded.spec.arms
    assert draft_mapping(arms, [f"my_{name}" for name in names], "deg").joints["elbow_flex"].name == "my_elbow_flex.pos"
    assert draft_mapping(arms, [*"abcde", "gripper"], "deg").joints["elbow_flex"].name == "c"
    swapped = [f"{letter}_{names[0]}" for letter in "ab"]
    both = [f"{side}_{name}" for side in ("left", "right") for name in names]
    for wrong in (["base.pos", *names[1:]], both, names[:-1], [*"abcdef", "gripper"], [*swapped, *names[2:]]):
        with pytest.raises(UserError, match="and one gripper"):
            draft_mapping(arms, wrong, "deg")


def test_one_name_in_two_columns_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    data, external = read(recorded.path), read_features(recorded.path, [EXTERNAL])[EXTERNAL].view(4, STEPS, -1)
    names = json.loads((recorded.path / "meta" / "info.json").read_text())["features"][EXTERNAL]["names"]
    parts = [[*values.view(4, STEPS, 6)] for values in (data.state_FS, data.action_FA)]
    more = {EXTERNAL: (names, [*external]), "other": (names[:1], [*external[..., :1]])}
    as_lerobot(tmp_path / "other", recorded.names, *parts, more)
    outcome = run(convert.main, [f"source={tmp_path / 'other'}", f"out={tmp_path / 'x'}", *TASK, DEG])
    assert "several columns have cube_pos[0] (observation.environment_state, other)" in outcome.stderr


def test_a_task_is_needed_and_only_for_joints(recorded: Recorded, tmp_path: Path) -> None:
    outcome = run(convert.main, [f"source={recorded.path}", f"out={tmp_path / 'set'}"])
    assert "task is missing" in outcome.stderr
    outcome = run(convert.main, [f"source={recorded.path / 'data'}", f"out={tmp_path / 'set'}", "task=lift"])
    assert "task: only for a LeRobotDataset" in outcome.stderr


def test_what_two_arms_recorded_becomes_demonstrations(tmp_path: Path) -> None:
    """Joint positions of both arms with LeRobot's names; each arm moves by an amount of its own."""
    spec = make_spec(compose_run({"task": "lift_bar", "task.robots": {"left": "so101", "right": "so101"}}), cameras=())
    low = {name: joint.home for name, joint in joints_of(spec.arms).items()}
    names = [*joint_names(spec.arms)[:5], "left_gripper.pos", *joint_names(spec.arms)[5:], "right_gripper.pos"]
    grip, steps, moves = gripper_entry(spec.arms["left_"], ""), np.linspace(0, 1, 30), {"left_": 0.2, "right_": 0.1}
    columns = []
    for name in names:
        if "gripper" in name:
            columns.append(np.full(30, 50.0 if name.startswith("left") else 80.0))
        else:
            columns.append(np.degrees(low[name.removesuffix(".pos")] + moves[name[: name.index("_") + 1]] * steps))
    positions = np.stack(columns, 1)
    external = StateBuilder(spec).external_names
    more = {"observation.environment_state": (external, [np.zeros((30, len(external)))])}
    as_lerobot(tmp_path / "source", names, [positions], [positions], more)
    radians = np.where(
        [name.startswith("right") and "gripper" not in name for name in names], np.radians(positions), positions
    )
    as_lerobot(tmp_path / "mixed", names, [radians], [radians], more)
    words = ["task=lift_bar", "task.robots={left: so101, right: so101}", "unit=deg"]
    found = run(convert.main, [f"source={tmp_path / 'source'}", *words, f"out={tmp_path / 'set'}"])
    assert found.code == 0, found.stderr
    mixed = run(convert.main, [f"source={tmp_path / 'mixed'}", *words, f"out={tmp_path / 'other'}"])
    assert "all right joints read as degrees are within 6.28 degrees: give unit=rad" in mixed.stderr
    assert "the left tool is" in found.stderr
    assert "the right tool is" in found.stderr
    data = read(tmp_path / "set")
    state = dict(zip(spec.state_names, (data.state_FS.numpy() / spec.state_scale).T, strict=True))
    for side in moves:
        np.testing.assert_allclose(
            state[f"{side}joint_pos[0]"], low[f"{side}shoulder_pan"] + moves[side] * steps, atol=1e-5
        )
    opened = grip.from_robot(np.array([50.0, 80.0]))
    assert state["left_fingers[0]"][0] == pytest.approx(opened[0], abs=1e-5)
    assert state["right_fingers[0]"][0] == pytest.approx(opened[1], abs=1e-5)
