"""Overrides and groups: grammar, precedence, and messages that help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from embodied.core.config import apply_values, compose, nest, parse_overrides
from embodied.core.errors import UserError


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    """A train.yaml with two tasks, one of them with tuned settings."""
    files = {
        "train.yaml": "defaults: [task: reach, policy: flow, algo: ppo, runtime: local, sim: mujoco, _self_]\n"
        "num_envs: 8\nmax_staleness: 1\n",
        "task/reach.yaml": "name: reach\ngoal_m: 0.1\n",
        "task/lift.yaml": "name: lift\ntuned:\n  flow-ppo:\n    num_envs: 16\n    algo: {gamma: 0.97, epochs: 3}\n",
        "policy/flow.yaml": "name: flow\n",
        "policy/gaussian.yaml": "name: gaussian\n",
        "algo/ppo.yaml": "name: ppo\ngamma: 0.99\nepochs: 5\n",
        "runtime/local.yaml": "name: local\nmax_staleness: ${max_staleness}\n",
        "sim/mujoco.yaml": "name: mujoco\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_words_become_typed_values() -> None:
    words = ["a=1", "b=1e-3", "c=true", "d=null", "e=[1,2]", "f.g=text", "h='runs/a b=c'", "++i=2", "a=3"]
    assert parse_overrides(words) == {
        "a": 3, "b": 1e-3, "c": True, "d": None, "e": [1, 2], "f.g": "text", "h": "runs/a b=c", "i": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "word",
    ["num_envs", "=3", "--num-envs=3 4[", "seed=1,2", "~seed=1", "task@x=reach", "a=[1,2", "a='x", ".a=1", "a..b=1"],
)
def test_words_that_are_not_overrides(word: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([word])
    assert word.partition("=")[0] in str(caught.value)


def test_a_quoting_problem_says_how_to_quote() -> None:
    for path in ("runs/a=b", "runs/a,b", "runs/ä", "runs/(a, b)"):
        with pytest.raises(UserError, match=re.escape(f"'{path}'") + ".*Quote.*" + re.escape(f"""'out="{path}"'""")):
            parse_overrides([f"out={path}"])
        assert parse_overrides([f'out="{path}"']) == {"out": path}


def test_the_home_directory_may_be_a_tilde() -> None:
    for word in ("out=~/my runs/x", 'out="~/my runs/x"'):
        assert parse_overrides([word]) == {"out": str(Path.home() / "my runs" / "x")}


def test_precedence_is_command_line_then_tuned_then_group(config_dir: Path) -> None:
    plain = compose(config_dir, {})
    assert (plain["num_envs"], plain["algo"]) == (8, {"name": "ppo", "gamma": 0.99, "epochs": 5})
    tuned = compose(config_dir, {"task": "lift"})
    assert (tuned["num_envs"], tuned["algo"]) == (16, {"name": "ppo", "gamma": 0.97, "epochs": 3})
    assert tuned["task"] == {"name": "lift"}
    user = compose(config_dir, {"task": "lift", "algo.gamma": 0.5, "num_envs": 4})
    assert (user["num_envs"], user["algo"]) == (4, {"name": "ppo", "gamma": 0.5, "epochs": 3})
    other_policy = compose(config_dir, {"task": "lift", "policy": "gaussian"})
    assert other_policy["num_envs"] == 8


def test_tuned_settings_of_a_policy_are_below_those_of_a_task(config_dir: Path) -> None:
    path = config_dir / "policy" / "flow.yaml"
    path.write_text(path.read_text() + "\ntuned:\n  flow-ppo: {num_envs: 4, algo: {gamma: 0.5, epochs: 9}}\n")
    lift = compose(config_dir, {"task": "lift"})
    assert (lift["num_envs"], lift["algo"]["gamma"], lift["algo"]["epochs"]) == (16, 0.97, 3)
    reach = compose(config_dir, {"task": "reach"})
    assert (reach["num_envs"], reach["algo"]["gamma"], reach["algo"]["epochs"]) == (4, 0.5, 9)
    assert "tuned" not in reach["policy"]


def test_settings_with_init_are_between_tuned_and_the_command_line(config_dir: Path) -> None:
    path = config_dir / "train.yaml"
    path.write_text(
        path.read_text() + "\nwith_init:\n  flow-ppo: {num_envs: 8, algo: {gamma: 0.5, epochs: 9}, seed: 3}\n"
    )
    without = compose(config_dir, {"task": "lift"})
    assert (without["num_envs"], without["algo"]["gamma"], without.get("seed")) == (16, 0.97, None)
    with_init = compose(config_dir, {"task": "lift", "init": "runs/x", "algo.epochs": 2})
    assert (with_init["num_envs"], with_init["algo"], with_init["seed"]) == (
        8, {"name": "ppo", "gamma": 0.5, "epochs": 2}, 3,
    )  # fmt: skip
    reach = compose(config_dir, {"task": "reach", "init": "runs/x"})
    assert (reach["num_envs"], reach["algo"]["gamma"]) == (8, 0.5)


def test_tuned_settings_of_nothing_are_an_error(config_dir: Path) -> None:
    (config_dir / "task" / "lift.yaml").write_text("name: lift\ntuned:\n  flow: {num_envs: 16}\n")
    with pytest.raises(UserError, match=r"in 'tuned' of task lift 'flow'\. Did you mean 'flow-ppo'\?"):
        compose(config_dir, {"task": "lift"})


def test_interpolation_sees_the_command_line(config_dir: Path) -> None:
    assert compose(config_dir, {"max_staleness": 0})["runtime"]["max_staleness"] == 0
    with pytest.raises(UserError, match="nothing"):
        compose(config_dir, {"num_envs": "${nothing}"})


def test_unknown_group_choice_names_the_nearest(config_dir: Path) -> None:
    with pytest.raises(UserError, match=r"unknown task 'rech'\. Did you mean 'reach'\? Allowed: lift, reach"):
        compose(config_dir, {"task": "rech"})
    with pytest.raises(UserError, match="unknown policy"):
        compose(config_dir, {"policy": {"name": "flow"}})


def test_a_group_of_the_wrong_shape(config_dir: Path) -> None:
    with pytest.raises(UserError, match=r"num_envs\.x: 'num_envs' is a value"):
        compose(config_dir, {"num_envs.x": 1})


def test_nesting() -> None:
    assert nest({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
    with pytest.raises(UserError):
        nest({"a": 1, "a.b": 2})
    root: dict[str, Any] = {"a": {"b": 0}}
    apply_values(root, {"a.b": 1})
    assert root == {"a": {"b": 1}}
