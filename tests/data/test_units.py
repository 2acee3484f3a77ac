"""Data sets in other units than the task's: refused or named, and converted by the options that the message gives."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.config import nest, parse_overrides
from embodied.core.errors import UserError
from embodied.core.spec import ActionTerm, Box, EnvSpec, Term
from embodied.data import Demonstrations, Episode, read, write
from embodied.data.lerobot import check_fits

SPEC = EnvSpec(
    task="turn",
    state=(Term("joint_pos", 2, "rad"), Term("fingers", 1, "m", scale=25.0), Term("flag", 1)),
    action=Box((
        ActionTerm("dx", scale=0.06, unit="m"),
        ActionTerm("djoint", scale=0.15, unit="rad"),
        ActionTerm("gripper", scale=0.025, offset=0.015, unit="m"),
        ActionTerm("torque"),
    )),
    control_dt_s=0.05,
    max_episode_steps=50,
)  # fmt: skip
SCALE, OFFSET = torch.tensor([0.06, 0.15, 0.025, 1.0]), torch.tensor([0.0, 0.0, 0.015, 0.0])
SHARES = torch.stack([torch.linspace(-0.9, 1, 40).roll(7 * i) for i in range(4)], 1)
STATE = torch.stack([torch.linspace(-2.5, 2.0, 40), torch.linspace(0, 1, 40), torch.ones(40), torch.zeros(40)], 1)


def written(path: Path, action: Tensor = SHARES, state: Tensor = STATE, spec: EnvSpec = SPEC) -> Path:
    write(path / "set", [Episode(state, action, torch.zeros(40), torch.ones(40, dtype=torch.bool), "turn")], spec)
    (path / "set" / "meta" / "units.json").unlink()  # as a data set of others
    return path / "set"


def options(message: str) -> dict[str, Any]:
    """The data_keys that a message gives, as the command line reads them."""
    words = shlex.split(message.partition("give ")[2])
    return nest(parse_overrides(words))["data_keys"]


def refused(path: Path, keys: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError, match="its action goes beyond -1 to 1, which is all that task turn allows") as error:
        check_fits(read(path, keys), SPEC, path, keys)
    return str(error.value)


def converted(path: Path, message: str) -> Demonstrations:
    keys = options(message)
    data = read(path, keys)
    assert check_fits(data, SPEC, path, keys) == []
    return data


def test_numbers_in_the_space_are_taken_as_they_are(tmp_path: Path) -> None:
    overshoot = SHARES.clone()
    overshoot[3] = 1.0001  # rounding
    path = written(tmp_path, overshoot)
    assert check_fits(read(path), SPEC, path) == []
    assert torch.equal(read(path).action_FA, overshoot)


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (100 * SHARES, "dx from -90 to 100 (percent?), djoint from -90 to 100 (percent?), gripper from"),
        (50 * (SHARES + 1), "dx from 5 to 100 (numbers from 0 to 100 for -1 to 1?)"),
        (SHARES * torch.tensor([60.0, 27 / math.pi, 1, 1]), "dx from -54 to 60 (mm?), djoint from -7.735 to 8.594"),
        (SHARES * torch.tensor([1, 1, 1, 87.0]), "torque from -78.3 to 87 (percent?)"),
        (SHARES * torch.tensor([1, 1, 1, 870.0]), "torque from -783 to 870 (numbers from -870 to 870 for -1 to 1?)"),
        (SHARES.masked_fill(torch.tensor([False] * 3 + [True]), 70.0), "from 70 to 70 (numbers from 0 to 100 for"),
    ],
    ids=["percent", "percent from 0", "mm and degrees", "one entry", "no unit", "constant"],
)  # fmt: skip
def test_actions_beyond_the_space_are_refused_with_what_would_fit(action: Tensor, named: str, tmp_path: Path) -> None:
    path = written(tmp_path, action)
    message = refused(path)
    assert named in message
    data = read(path, options(message))
    assert 0.1 <= float(data.action_FA.abs().amax(0).min())
    assert float(data.action_FA.abs().max()) <= 1.001
    check_fits(data, SPEC, path, options(message))


def test_one_unit_for_all_entries_is_likelier_than_one_for_each(tmp_path: Path) -> None:
    """Of an environment whose commands are degrees and a gripper from 0 to 100."""
    terms = (ActionTerm("a", scale=110.0), ActionTerm("b", scale=100.0), ActionTerm("grip", scale=50.0, offset=50.0))
    spec = replace(SPEC, action=Box(terms))
    scale, offset = torch.tensor([110.0, 100.0, 50.0]), torch.tensor([0.0, 0.0, 50.0])
    commands = offset + scale * SHARES[:, :3] * torch.tensor([0.8, 0.6, 0.9])
    path = written(tmp_path, commands, spec=spec)
    with pytest.raises(UserError, match="If so, give") as error:
        check_fits(read(path), spec, path)
    data = read(path, options(str(error.value)))
    torch.testing.assert_close(offset + scale * data.action_FA, commands, rtol=1e-4, atol=1e-3)


def test_an_entry_that_cannot_move_needs_no_unit(tmp_path: Path) -> None:
    """gymnasium's boxes may have such entries."""
    spec = replace(SPEC, action=Box((ActionTerm("a"), ActionTerm("fixed", scale=0.0, offset=2.0))))
    path = written(tmp_path, SHARES[:, :2], spec=spec)
    assert check_fits(read(path), spec, path) == []


def test_the_options_of_the_message_recover_the_actions(tmp_path: Path) -> None:
    path = written(tmp_path, 100 * SHARES)
    torch.testing.assert_close(converted(path, refused(path)).action_FA, SHARES)


def test_what_was_converted_wrongly_gets_options_that_count_both(tmp_path: Path) -> None:
    path = written(tmp_path, 100 * SHARES)
    message = refused(path, {"action": {"scale": [10.0], "offset": [0.5]}})
    assert float(read(path, options(message)).action_FA.abs().max()) <= 1.001


def test_entries_that_use_hardly_any_of_the_space_are_named(tmp_path: Path) -> None:
    """In the units of the command: all but the last are far below 1."""
    path = written(tmp_path, OFFSET + SCALE * SHARES)
    (line,) = check_fits(read(path), SPEC, path)
    assert "its action uses a small part of -1 to 1" in line
    assert "dx from -0.054 to 0.06 (m?)" in line
    assert "gripper from -0.0075 to 0.04 (m?)" in line
    assert "torque" not in line
    assert "djoint" not in line, "0.15 rad is more than a tenth"
    data = converted(path, line)
    torch.testing.assert_close(data.action_FA[:, [0, 2, 3]], SHARES[:, [0, 2, 3]], atol=1e-4, rtol=0)
    still = SHARES.masked_fill(torch.tensor([False, False, False, True]), 0.0)
    assert check_fits(read(written(tmp_path / "still", still)), SPEC, path) == [], "an entry that is not used"
    slow = written(tmp_path / "slow", SHARES * torch.tensor([1, 1, 1, 0.01]))
    (line,) = check_fits(read(slow), SPEC, slow)
    assert line.endswith("torque from -0.009 to 0.01")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-2.0, 2.0)])
def test_actions_that_may_be_in_the_units_of_an_environment_are_named(low: float, high: float, tmp_path: Path) -> None:
    """Throttle from 0 to 0.8, or a torque within 0.9 of 2: both fit into -1 to 1 as they are."""
    term = ActionTerm("action[0]", scale=(high - low) / 2, offset=(high + low) / 2)
    spec = replace(SPEC, action=Box((term,)))
    action = torch.linspace(max(low, -0.9), 0.8, len(SHARES))[:, None]
    path = written(tmp_path, action, spec=spec)
    (line,) = check_fits(read(path), spec, path)
    assert "its action states no unit" in line
    assert "(the environment's unit?)" in line
    torch.testing.assert_close(read(path, options(line)).action_FA, (action - term.offset) / term.scale)
    assert check_fits(read(path, options(line)), spec, path, options(line)) == []
    stated = {"action": {"scale": [1.0]}}  # they are fractions, and the user says so
    assert check_fits(read(path, stated), spec, path, stated) == []


def test_a_gripper_in_half_of_its_range_is_named(tmp_path: Path) -> None:
    """LeRobot's unit; a step may well have one direction."""
    path = written(tmp_path, torch.stack([SHARES[:, 0].abs().round(), *SHARES.T[1:]], 1))
    assert check_fits(read(path), SPEC, path) == []
    path = written(tmp_path / "gripper", torch.stack([*SHARES.T[:2], SHARES[:, 2].round().abs(), SHARES[:, 3]], 1))
    (line,) = check_fits(read(path), SPEC, path)
    assert "gripper from 0 to 1 (numbers from 0 to 1; if from 1 to 0, scale -2 and offset 1?)" in line
    assert options(line) == {"action": {"scale": [1, 1, 2, 1], "offset": [0, 0, -1, 0]}}


def test_states_too_large_for_their_unit_are_named(tmp_path: Path) -> None:
    degrees = STATE * torch.tensor([180 / math.pi, 180 / math.pi, 1, 1])
    path = written(tmp_path, state=degrees)
    (line,) = check_fits(read(path), SPEC, path)
    assert "too large for the task's units: joint_pos[0] from -143.2 to 114.6 (degrees?), joint_pos[1] from" in line
    torch.testing.assert_close(converted(path, line).state_FS, STATE, atol=1e-4, rtol=1e-4)


def test_a_data_set_of_ours_says_what_1_is(tmp_path: Path) -> None:
    """Demonstrations of larger steps than the task's: all numbers are in the space."""
    path, episode = tmp_path / "set", Episode(STATE, SHARES, torch.zeros(40), torch.ones(40, dtype=torch.bool), "turn")
    write(path, [episode], SPEC)
    assert check_fits(read(path), SPEC, path) == []
    assert isinstance(SPEC.action, Box)
    dx, *others = SPEC.action.terms
    smaller = replace(SPEC, action=Box((replace(dx, scale=0.03), *others)))
    (line,) = check_fits(read(path), smaller, path)
    assert "1 is something else in its action than in the task's: dx 0.06 m, not 0.03 m. To convert" in line
    keys = {"action": {"scale": [0.5, 1, 1, 1]}}
    assert check_fits(read(path, keys), smaller, path, keys) == []
    (path / "meta" / "units.json").write_text("[1]")
    with pytest.raises(UserError, match=r"cannot read meta/units\.json"):
        read(path)


# -- data_keys ---------------------------------------------------------------------------------------------------------
def test_entries_are_taken_by_name_and_in_the_order_of_the_task(tmp_path: Path) -> None:
    assert isinstance(SPEC.action, Box)
    other = replace(SPEC, action=Box(tuple(ActionTerm(name) for name in ("grip", "spare", "x", "turn", "force"))))
    action = torch.cat((SHARES[:, [2]], torch.full((40, 1), 9.0), SHARES[:, [0, 1, 3]]), 1)
    path = written(tmp_path, action, spec=other)
    with pytest.raises(UserError, match=r"its action has 5 entries, task turn has 4\. data_keys\.action\.entries="):
        check_fits(read(path), SPEC, path)
    keys = {"action": {"entries": ["x", "turn", "grip", "force"], "scale": [1, 1, -1, 1]}}
    data = read(path, keys)
    assert torch.equal(data.action_FA, SHARES * torch.tensor([1, 1, -1, 1]))
    assert check_fits(data, SPEC, path, keys) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"action": {"entries": ["dxx"]}}, "unknown entry of action in data_keys.action.entries 'dxx'. Did you mean"),
        ({"action": {"scale": [1, 2]}}, "data_keys.action.scale: got 2 numbers, allowed: one number, or one for"),
        ({"state": {"offset": [1, 2, 3]}}, "data_keys.state.offset: got 3 numbers, allowed: one number, or one for"),
        ({"action": {"scale": [0.0]}}, "data_keys.action.scale: got a 0, allowed: any other number"),
        ({"action": {"scal": [1.0]}}, "unknown key 'data_keys.action.scal'. Did you mean 'data_keys.action.scale'?"),
        ({"action": {"scale": 0.5}}, "data_keys.action.scale: got 0.5, allowed: a list"),
        ({"action": 5}, "data_keys.action: got 5, allowed: a name, or name, entries, scale and offset"),
        ({"image": "x"}, "data_keys.image: state, action and images can have other names"),
        ({"images": "x"}, "data_keys.images: got 'x', needed: data_keys.images.<camera>=<column>"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read(written(tmp_path), keys)
