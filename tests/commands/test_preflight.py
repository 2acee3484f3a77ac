"""``embodied.preflight``: each fault of a data set is found by its name, and a clean one passes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied import preflight
from embodied.data import read
from embodied.data.faults import check_frames
from embodied.data.lerobot import DISTURBANCE, PLAN, read_features
from embodied.session.config import compose_run
from embodied.session.factories import make_spec
from embodied.trainers.preflight import check_replay
from tests.commands.helpers import Outcome, run, run_collect

QUICK = ["device=cpu", "algo.updates=10", "policy.actor_hidden=[16]", "policy.head_hidden=[16]"]
"""Words of an imitation that only shows that it is made; the error that it leaves is a fault."""
Values = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten demonstrations of pick_place, with disturbances."""
    path = tmp_path_factory.mktemp("demos") / "pick_place"
    outcome = run_collect("task=pick_place", "episodes=10", f"out={path}", "num_threads=1")
    assert outcome.code == 0, outcome.stderr
    return path


def examine(path: Path, *words: str) -> Outcome:
    return run(preflight.main, [str(path), *words])


def changed(demos: Path, path: Path, **columns: Callable[[Values, Values], object]) -> Path:
    """A copy of the data set with changed columns: functions of a column [F, D] and of the episodes [F]."""
    shutil.copytree(demos, path)
    file = path / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(file)
    episode = table["episode_index"].to_numpy()
    for key, change in columns.items():
        place = next(i for i, name in enumerate(table.column_names) if name.replace(".", "_") == key)
        values = np.asarray(table.column(place).to_pylist())
        changed_values = np.asarray(change(values.copy(), episode))
        table = table.set_column(place, table.column_names[place], pa.array(changed_values.tolist()))
    pq.write_table(table, file)
    if "episode_index" in columns:  # else the frames are not those of the list of episodes
        shutil.rmtree(path / "meta" / "episodes")
    return path


def within(episode: Values, shift: int) -> Values:
    """Rows of the frames that are ``shift`` later in their episodes."""
    rows = np.arange(len(episode)) + shift
    return np.where(episode[rows.clip(0, len(rows) - 1)] == episode, rows.clip(0, len(rows) - 1), np.arange(len(rows)))


def times(factor: float, *entries: int, plus: float = 0.0) -> Callable[[Values, Values], object]:
    def change(values: Values, episode: Values) -> Values:
        values[:, entries] = plus + factor * values[:, entries]
        return values

    return change


def options(cure: str) -> list[str]:
    """The words that a cure says to give, as a shell reads them."""
    return [word for word in shlex.split(cure) if word.startswith("data_keys.")]


def exchange(values: Values, episode: Values) -> Values:
    values[:, [0, 1]] = values[:, [1, 0]]
    return values


def test_a_clean_set_passes_and_its_policy_learns_the_episode(demos: Path) -> None:
    outcome = examine(demos, "device=cpu")
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    assert (result["task"], result["episodes"], result["passed"]) == ("pick_place", 10, True)
    assert result["replay"]["state_error"] < 1e-5
    assert result["replay"]["solved"] == 3
    assert result["overfit"]["error"] < 0.2
    assert result["faults"] == []
    assert outcome.stderr.splitlines()[-1] == "no faults found"
    assert "3 of 3 episodes end solved" in outcome.stderr
    assert result["overfit"]["solved"] in (True, False)
    assert "acting from its start, the policy" in outcome.stderr
    assert "{" not in outcome.stderr
    assert "False" not in outcome.stderr


@pytest.mark.parametrize(
    ("column", "change", "name", "what", "cure"),
    [
        ("action", lambda a, e: a[within(e, -1)], "action shift", "actions are one step late", "['action'].shift(-1)"),
        ("action", lambda a, e: a[within(e, 1)], "action shift", "actions are one step early", "['action'].shift(1)"),
        ("observation_state", lambda s, e: s[within(e, -1)], "action shift", "states are one step late",
         "['observation.state'].shift(-1)"),
        ("action", times(0.06, 1), "action units", "dy in m", "scale=[1,16.6667,1,1]"),
        ("action", times(6, 0, 1, 2), "action units", "dx, dy, dz in cm", "scale=[0.166667,0.166667,0.166667,1]"),
        ("action", times(60, 0, 1, 2), "action units", "dx, dy, dz in mm", "scale=[0.0166667,0.0166667,0.0166667,1]"),
        ("action", times(0.5, 3, plus=0.5), "action units", "gripper in numbers from 0 to 1 for -1 to 1",
         "'data_keys.action.scale=[1,1,1,2]' 'data_keys.action.offset=[0,0,0,-1]'"),
        ("action", times(-0.5, 3, plus=0.5), "action units", "gripper in numbers from 1 to 0 for -1 to 1",
         "'data_keys.action.scale=[1,1,1,-2]' 'data_keys.action.offset=[0,0,0,1]'"),
        ("action", times(50, 3, plus=50), "action units", "gripper in numbers from 0 to 100 for -1 to 1",
         "scale=[1,1,1,0.02]"),
        ("action", times(-0.3, 3, plus=0.5), "action units", "gripper in numbers from 0.8 to 0.2 for -1 to 1",
         "scale=[1,1,1,-3.33333]"),
        ("action", exchange, "action order", "dx, dy are in each other's places", 'entries=["dy","dx","dz","gripper"]'),
        ("action", times(-1, 1), "action sign", "dy with the other sign", "scale=[1,-1,1,1]"),
        ("observation_state", times(180 / pi, *range(14)), "state units", "joint_pos[4] times 57.3",
         f"'data_keys.state.scale=[{'0.0174533,' * 14}{'1,' * 25}1]'"),
        ("observation_state", exchange, "state order", "joint_pos[0] in the place of joint_pos[1]", "entries="),
        ("observation_state", times(-1, 2), "state units", "simulator: joint_pos[2] times -1", "scale=[1,1,-1,1,"),
    ],
)  # fmt: skip
def test_a_replay_finds_what_the_numbers_mean(
    column: str, change: Callable[[Values, Values], object], name: str, what: str, cure: str, demos: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    outcome = examine(changed(demos, tmp_path / "set", **{column: change}), *QUICK)
    assert outcome.code == 1, outcome.stderr
    found = {fault["name"]: fault for fault in outcome.result["faults"]}
    assert set(found) <= {name, "overfit"}, "nothing contradicts it"
    assert what in found[name]["what"], outcome.stderr
    assert cure in found[name]["cure"], outcome.stderr
    assert outcome.stderr.splitlines()[0].startswith("FAULT ")
    if "shift" in name:
        return
    cured = examine(tmp_path / "set", *QUICK, *options(found[name]["cure"]))
    assert {fault["name"] for fault in cured.result["faults"]} <= {"overfit"}, cured.stderr


def test_what_was_converted_wrongly_gets_options_that_count_both(demos: Path, tmp_path: Path) -> None:
    path = changed(demos, tmp_path / "set", action=times(0.5, 3, plus=0.5))
    first = examine(path, *QUICK, "data_keys.action.scale=[1,1,1,-1]", "data_keys.action.offset=[0,0,0,1]")
    (fault,) = (fault for fault in first.result["faults"] if fault["name"] != "overfit")
    assert options(fault["cure"]) == ["data_keys.action.scale=[1,1,1,2]", "data_keys.action.offset=[0,0,0,-1]"]


def test_options_that_no_replay_confirms_are_not_given(demos: Path, tmp_path: Path) -> None:
    """Of steps that no unit explains."""
    outcome = examine(changed(demos, tmp_path / "set", action=lambda a, e: 3.7 * a**3), *QUICK)
    found = {fault["name"]: fault for fault in outcome.result["faults"]}
    assert set(found) == {"replay", "numbers"}
    assert "which is all that task pick_place allows: dx from -3.7 to 3.7" in found["numbers"]["what"]
    assert not any(options(fault["cure"]) for fault in found.values())


def test_the_sentence_about_shifted_columns_mends_the_files(demos: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = changed(demos, tmp_path / "set", action=lambda action, episode: action[within(episode, -1)])
    outcome = examine(path, *QUICK)
    assert outcome.stderr.splitlines()[-1].startswith("2 serious faults, the first: action shift")
    statement = outcome.result["faults"][0]["cure"].partition("in pandas: ")[2]
    file = path / "data" / "chunk-000" / "file-000.parquet"
    frames = pandas.read_parquet(file)
    exec(statement, {"frames": frames})
    frames.to_parquet(file)
    assert {fault["name"] for fault in examine(path, *QUICK).result["faults"]} <= {"overfit"}


@pytest.mark.parametrize("column", ["action", "observation_state"])
def test_the_rest_of_the_examination_has_the_columns_unshifted(column: str, demos: Path, tmp_path: Path) -> None:
    path = changed(demos, tmp_path / "set", **{column: lambda values, episode: values[within(episode, -1)]})
    config = compose_run({"task": "pick_place", "algo": "sft", "data": str(path)})
    clean, found = read(demos), read_features(path, (DISTURBANCE, PLAN))
    _, faults, cured = check_replay(config, make_spec(config), read(path), found)
    assert [fault.name for fault in faults] == ["action shift"]
    same_F = (cured.action_FA == clean.action_FA).all(1) & (cured.state_FS == clean.state_FS).all(1)
    assert int((~same_F).sum()) <= len(cured.episode_F.unique()), "all but the last frames"


def test_the_numbers_alone_show_faults(demos: Path, tmp_path: Path) -> None:
    def measured(state: Values, episode: Values) -> Values:
        state[:, 3], state[7, 5] = 0.5, 400.0
        return state

    def late(time: Values, episode: Values) -> Values:
        return time + 0.04 * (np.arange(len(time)) == 5)

    def alone(episodes: Values, episode: Values) -> Values:
        return episodes + (np.arange(len(episodes)) == len(episodes) - 1)

    path = changed(demos, tmp_path / "set", observation_state=measured, timestamp=late, episode_index=alone)
    outcome = examine(path, *QUICK)
    assert outcome.code == 1
    found = {fault["name"]: fault for fault in outcome.result["faults"]}
    assert found["time stamps"]["what"] == "frames that are not 0.05 s before the next: 2"
    assert found["time stamps"]["where"] == "4, 5"
    assert found["one frame"]["where"] == "10"
    assert "joint_pos[3]" in found["constant"]["where"]
    assert "joint_pos[5] in 0.18% of the frames" in found["outliers"]["where"]
    assert "joint_pos[5] from" in found["numbers"]["what"]


def test_images_and_lengths_are_looked_at(demos: Path) -> None:
    data, spec = read(demos), make_spec(compose_run({"task": "pick_place"}))
    images = torch.randint(0, 255, (len(data.state_FS), 4, 4, 3), dtype=torch.uint8)
    still, images[9] = images[:1].expand_as(images), 0
    seen = replace(data, images={"front": images, "wrist": still})
    faults = check_frames(seen, None, replace(spec, max_episode_steps=60))
    assert [str(fault).partition(".")[0] for fault in faults if fault.name in ("images", "time limit")] == [
        "doubt time limit: episodes longer than the time limit of 60 steps: 2; 3, 5",
        "FAULT images: images of camera front that are black or of one colour: 1; 9",
        "FAULT images: cameras that show one image in all frames: 1; wrist",
    ]


def test_numbers_that_are_not_finite_are_a_fault(demos: Path, tmp_path: Path) -> None:
    outcome = examine(changed(demos, tmp_path / "set", observation_state=times(np.nan, 4)))
    assert outcome.code == 1
    (fault,) = outcome.result["faults"]
    assert "observation.state is not finite in 553 frames" in fault["what"]
    assert fault["cure"].startswith(
        f"Mend it, or leave out its episode: HF_LEROBOT_HOME={tmp_path} lerobot-edit-dataset "
    )
    assert fault["cure"].endswith("'--operation.episode_indices=[0,1,2,3,4,5,6,7,8,9]'")


def test_a_policy_cannot_imitate_a_contradictory_episode(demos: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    contradictory = changed(
        demos, tmp_path / "set",
        observation_state=lambda state, episode: state[np.arange(len(state)) // 8 * 8],
        action=lambda action, episode: random.uniform(-1, 1, action.shape),
    )  # fmt: skip
    outcome = examine(contradictory, "device=cpu", "algo.updates=300")
    assert {"replay", "overfit"} <= {fault["name"] for fault in outcome.result["faults"]}
    assert outcome.result["overfit"]["error"] > 0.7


def test_a_set_without_disturbances_is_replayed_by_its_actions_alone(demos: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(demos, tmp_path / "set"))
    info = json.loads((path / "meta" / "info.json").read_text())
    del info["features"]["disturbance"]
    (path / "meta" / "info.json").write_text(json.dumps(info))
    outcome = examine(path, *QUICK)
    assert "Traceback" not in outcome.stderr
    told = "the data set lacks disturbance, so these are replays of its actions alone"
    assert told in outcome.result["replay"]["told"]
    assert "replay" in {fault["name"] for fault in outcome.result["faults"]}  # it was recorded with disturbances


def test_a_foreign_set_is_replayed_from_other_starts(tmp_path: Path) -> None:
    demos = tmp_path / "demos"
    assert run_collect("task=push", "noise=0", "episodes=3", f"out={demos}", "num_threads=1").code == 0
    info = json.loads((demos / "meta" / "info.json").read_text())
    for feature in ("episode_plan", "disturbance"):
        del info["features"][feature]
    (demos / "meta" / "info.json").write_text(json.dumps(info))
    (demos / "meta" / "recorded_with.json").unlink()
    assert examine(demos).stderr == "error: task is missing: give task=...\n"
    assert "unknown key 'lr'." in examine(demos, "lr=1e-3").stderr
    clean = examine(demos, "task=push", *QUICK).result
    assert clean["replay"]["told"].startswith("from other starts, since the data set lacks episode_plan, as collect")
    assert 0.7 < clean["replay"]["alike"] <= 1.0
    assert {fault["name"] for fault in clean["faults"]} <= {"constant", "overfit"}
    late = changed(demos, tmp_path / "late", action=lambda action, episode: action[within(episode, -1)])
    found = {fault["name"]: fault for fault in examine(late, "task=push", *QUICK).result["faults"]}
    assert (found["action shift"]["serious"], found["action shift"]["what"]) == (False, "actions are one step late")
    other = changed(
        demos, tmp_path / "other", action=lambda action, _: np.random.default_rng(0).uniform(-1, 1, action.shape)
    )
    found = {fault["name"]: fault for fault in examine(other, "task=push", *QUICK).result["faults"]}
    assert found["replay"]["what"] == "recorded actions do not explain how the recorded robot moves"


@pytest.mark.parametrize(("factor", "scale"), [(60, "0.0166667"), (0.06, "16.6667")])
def test_options_that_no_replay_contradicts_are_given(factor: float, scale: str, demos: Path, tmp_path: Path) -> None:
    """Steps in mm and in m of a data set from elsewhere, whose replays show no more than that they do not fit."""
    path = changed(demos, tmp_path / "set", action=lambda a, e: a[within(e, 8)] * [factor, factor, factor, 1])
    info = json.loads((path / "meta" / "info.json").read_text())
    for feature in ("episode_plan", "disturbance"):
        del info["features"][feature]
    (path / "meta" / "info.json").write_text(json.dumps(info))
    (path / "meta" / "units.json").unlink()
    outcome = examine(path, *QUICK)
    found = {fault["name"]: fault for fault in outcome.result["faults"]}
    assert found["replay"]["what"] == "recorded actions do not explain how the recorded robot moves", outcome.stderr
    assert options(found["numbers"]["cure"]) == [f"data_keys.action.scale=[{scale},{scale},{scale},1]"]


def test_a_gripper_that_moves_the_other_way_is_doubted(demos: Path, tmp_path: Path) -> None:
    path = changed(demos, tmp_path / "set", action=times(-1, 3))
    config = compose_run({"task": "pick_place", "algo": "sft", "data": str(path)})
    _, faults, _ = check_replay(config, make_spec(config), read(path), {})
    assert [(fault.what, fault.where) for fault in faults] == [
        ("a part of the robot moves otherwise than in replays from other starts", "fingers")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "data is missing"),
        (["lr=1e-3"], "unknown key 'lr'."),
        (["epsodes=3"], "unknown key 'epsodes'."),
        (["data=nowhere"], "data=nowhere is not a LeRobotDataset: it has no meta/info.json"),
        (["task=stack"], "task: got stack, allowed: pick_place, which this data set is of"),
        (["task.control.mode=joint_delta"], "its action has 4 entries, task pick_place has 8"),
        (["algo=ppo"], "algo: got ppo, allowed: sft"),
        (["task=psh"], "Did you mean 'push'?"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str, demos: Path) -> None:
    without = not words or words[0].startswith(("data=", "lr=", "epsodes="))
    known = [] if without else [f"data={demos}"]
    outcome = run(preflight.main, [*known, *words])
    assert outcome.code == 2, outcome.stderr
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_frame_in_each_episode_is_named(demos: Path, tmp_path: Path) -> None:
    path = changed(demos, tmp_path / "set", episode_index=lambda episodes, episode: np.arange(len(episodes)))
    result = examine(path, *QUICK).result
    assert result["replay"]["told"] == "not possible: the first episodes have one frame"
    assert "episodes of one frame: 553" in [fault["what"] for fault in result["faults"]]


def test_a_set_without_data_files_is_refused(demos: Path, tmp_path: Path) -> None:
    shutil.copytree(demos, tmp_path / "set")
    shutil.rmtree(tmp_path / "set" / "data")
    outcome = examine(tmp_path / "set")
    assert (outcome.code, "it has no data files" in outcome.stderr) == (2, True), outcome.stderr


def test_an_empty_set_is_refused(demos: Path, tmp_path: Path) -> None:
    path = changed(demos, tmp_path / "set")
    file = path / "data" / "chunk-000" / "file-000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    outcome = examine(path)
    assert (outcome.code, "frames must be there" in outcome.stderr) == (2, True)
