"""``embodied.collect expert=``: a user's own expert in a task that has none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.data.lerobot import read
from tests.commands.helpers import run_collect

TASK = "task=gym/tests.envs.toy_gym:Ending-v0"  # observes its start and its step; succeeds from step 3 on


def counting(state: Mapping[str, Tensor]) -> Tensor:
    """The first action is a tenth of the step; the second is out of range."""
    (values_N2,) = state.values()
    return torch.stack([values_N2[:, 1] / 10, torch.full((len(values_N2),), 7.0)], 1)


def flat(state: Mapping[str, Tensor]) -> Tensor:
    return torch.zeros(2)


def broken(state: Mapping[str, Tensor]) -> Tensor:
    return torch.full((len(next(iter(state.values()))), 2), torch.nan)


NUMBER = 3


def test_its_actions_are_recorded_for_the_states_that_it_saw(tmp_path: Path) -> None:
    words = [TASK, "episodes=3", "noise=0.5", f"expert={__name__}:counting", f"out={tmp_path / 'demos'}"]
    outcome = run_collect(*words)
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["solved"] == outcome.result["tried"] == 3
    data = read(tmp_path / "demos")
    state_FS, action_FA = data.state_FS, data.action_FA
    assert len(state_FS) == outcome.result["frames"] > 3
    torch.testing.assert_close(action_FA[:, 0], state_FS[:, 1] / 10)
    assert (action_FA[:, 1] == 1).all()


@pytest.mark.parametrize(
    ("expert", "said"),
    [
        ("flat", "must return actions [3, 2], got [2]"),
        ("broken", "must return actions [3, 2], got NaN"),
        ("NUMBER", "is not a function"),
        ("counted", "AttributeError"),
    ],
)
def test_an_expert_that_cannot_be_used(tmp_path: Path, expert: str, said: str) -> None:
    outcome = run_collect(TASK, "episodes=3", f"expert={__name__}:{expert}", f"out={tmp_path / 'demos'}")
    assert outcome.code == 2
    assert said in outcome.stderr
    assert not (tmp_path / "demos").exists()


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    outcome = run_collect(TASK, "expert=nowhere.at_all:expert", f"out={tmp_path / 'demos'}")
    assert outcome.code == 2
    assert "must be <module>:<function>" in outcome.stderr
