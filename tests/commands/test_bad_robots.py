"""A bad robot file ends a training with one clear line and exit code 2, before there is a run directory."""

from __future__ import annotations

from pathlib import Path

import mujoco
import pytest
import yaml

from embodied import train
from embodied.envs.mujoco.robot_file import FOLDER

SO101 = yaml.safe_load((FOLDER / "so101.yaml").read_text())
GRIPPER, TOOL, CONTROL = SO101["gripper"], SO101["tool"], SO101["control"]
MESH = '<asset><mesh name="lost" file="lost.stl"/></asset><worldbody><geom type="mesh" mesh="lost"/>'


@pytest.mark.parametrize(
    ("changes", "words", "expected"),
    [
        ({}, "task.robot={folder}/my_am.yaml", "my_arm.yaml"),
        ({}, "task.robot=so11", "Did you mean 'so101'?"),
        ({"home": SO101["home"] | {"elbow": 0.0}}, "", "in home of robot my_arm 'elbow'. Did you mean 'elbow_flex'"),
        ({"tool": TOOL | {"body": "griper"}}, "", "body in robot my_arm 'griper'. Did you mean 'gripper'?"),
        ({"tool": {"site": "gripperfram"}}, "", "site in robot my_arm 'gripperfram'. Did you mean 'gripperframe'?"),
        ({}, "task.cube_half_m=0.04", "cube_half_m: got 0.04, allowed: 0 to 0.0246"),
        ({"gripper": GRIPPER | {"closed": 0.5}}, "", "cube_half_m: got 0.01225, allowed: 0.021"),
        ({}, "task.goal_high_m=[0.7,0.1,0.2]", "m is 0.320 m out of reach of the robot my_arm, whose tool is at ("),
        ({}, "mesh", "lost.stl"),
        ({}, "fixed shoulder_pan", "the 4 joints of robot my_arm cannot move the tool along y alone"),
        ({}, "fixed wrist_roll", "orientation=free, rotation=true, but the 4 joints of robot my_arm cannot move"),
        ({}, "fixed wrist_roll", " alone, allowed: rotation=false, or mode=joint_delta"),
        ({"home": SO101["home"] | {"shoulder_pan": 1.5}}, "", "beside or behind the base, and an arm must face +x: "),
        ({}, "mm", "m outside of the workspace, from (0.12, -0.2, 0.012) to (0.38, 0.2, 0.25): are its lengths in mm?"),
    ],
)  # fmt: skip
def test_it_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: str, expected: str
) -> None:
    text = (FOLDER / SO101["mjcf"]).read_text()
    data = SO101 | {"mjcf": "my_arm.xml"} | changes
    if words == "mesh":
        text, words = text.replace("<worldbody>", MESH), ""
    if words == "mm":
        spec, words = mujoco.MjSpec.from_string(text), ""
        for body in spec.bodies:
            body.pos *= 1000
        text = spec.to_xml()
    if words.startswith("fixed "):  # shoulder_pan: the arm stays in a vertical plane
        joint, words = words.split()[1], ""
        start = text.index(f'<joint name="{joint}"')
        text = text[:start] + text[text.index("/>", start) + 2 :]
        text = "\n".join(line for line in text.splitlines() if f'joint="{joint}"' not in line)
        for key in ("home", "max_velocity"):
            data[key] = {name: value for name, value in SO101[key].items() if name != joint}
    (tmp_path / "my_arm.xml").write_text(text)
    (tmp_path / "my_arm.yaml").write_text(yaml.safe_dump(data))
    robot = "" if "task.robot" in words else f"task.robot={tmp_path}/my_arm.yaml"
    out = tmp_path / "run"
    argv = ["task=lift", *filter(None, [robot, words.format(folder=tmp_path)]), f"out={out}", "total_steps=64"]
    assert train.main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert len(error.splitlines()) == 1
    assert not out.exists()
