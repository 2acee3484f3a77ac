"""Overrides, groups and dataclass conversion: precedence, types, and messages that help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from embodied.core.config import apply_values, at_least, compose, describe, from_mapping, nest, parse_overrides
from embodied.core.errors import UserError


@dataclass(frozen=True)
class Network:
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["elu", "relu"] = "elu"


@dataclass(frozen=True)
class Options:
    steps: int
    learning_rate: float = 3e-4
    name: str = "x"
    resume: str | None = None
    fast: bool = False
    network: Network = field(default_factory=Network)
    bounds: tuple[float, float] = (0.0, 1.0)
    extra: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 1)


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
    with pytest.raises(UserError, match=r"""out.*'runs/a=b'.*'out="runs/a=b"'"""):
        parse_overrides(["out=runs/a=b"])
    assert parse_overrides(['out="runs/a=b"']) == {"out": "runs/a=b"}


def test_precedence_is_command_line_then_tuned_then_group(config_dir: Path) -> None:
    plain = compose(config_dir, "train", {})
    assert (plain["num_envs"], plain["algo"]) == (8, {"name": "ppo", "gamma": 0.99, "epochs": 5})
    tuned = compose(config_dir, "train", {"task": "lift"})
    assert (tuned["num_envs"], tuned["algo"]) == (16, {"name": "ppo", "gamma": 0.97, "epochs": 3})
    assert tuned["task"] == {"name": "lift"}
    user = compose(config_dir, "train", {"task": "lift", "algo.gamma": 0.5, "num_envs": 4})
    assert (user["num_envs"], user["algo"]) == (4, {"name": "ppo", "gamma": 0.5, "epochs": 3})
    other_policy = compose(config_dir, "train", {"task": "lift", "policy": "gaussian"})
    assert other_policy["num_envs"] == 8


def test_settings_with_init_are_between_tuned_and_the_command_line(config_dir: Path) -> None:
    path = config_dir / "train.yaml"
    path.write_text(
        path.read_text() + "\nwith_init:\n  flow-ppo: {num_envs: 8, algo: {gamma: 0.5, epochs: 9}, seed: 3}\n"
    )
    without = compose(config_dir, "train", {"task": "lift"})
    assert (without["num_envs"], without["algo"]["gamma"], without.get("seed")) == (16, 0.97, None)
    with_init = compose(config_dir, "train", {"task": "lift", "init": "runs/x", "algo.epochs": 2})
    assert (with_init["num_envs"], with_init["algo"], with_init["seed"]) == (
        8, {"name": "ppo", "gamma": 0.5, "epochs": 2}, 3,
    )  # fmt: skip
    reach = compose(config_dir, "train", {"task": "reach", "init": "runs/x"})
    assert (reach["num_envs"], reach["algo"]["gamma"]) == (8, 0.5)


def test_tuned_settings_of_nothing_are_an_error(config_dir: Path) -> None:
    (config_dir / "task" / "lift.yaml").write_text("name: lift\ntuned:\n  flow: {num_envs: 16}\n")
    with pytest.raises(UserError, match=r"in 'tuned' of task lift 'flow'\. Did you mean 'flow-ppo'\?"):
        compose(config_dir, "train", {"task": "lift"})


def test_interpolation_sees_the_command_line(config_dir: Path) -> None:
    assert compose(config_dir, "train", {"max_staleness": 0})["runtime"]["max_staleness"] == 0
    with pytest.raises(UserError, match="nothing"):
        compose(config_dir, "train", {"num_envs": "${nothing}"})


def test_unknown_group_choice_names_the_nearest(config_dir: Path) -> None:
    with pytest.raises(UserError, match=r"unknown task 'rech'\. Did you mean 'reach'\? Allowed: lift, reach"):
        compose(config_dir, "train", {"task": "rech"})
    with pytest.raises(UserError, match="unknown policy"):
        compose(config_dir, "train", {"policy": {"name": "flow"}})


def test_a_group_of_the_wrong_shape(config_dir: Path) -> None:
    with pytest.raises(UserError, match=r"num_envs\.x: 'num_envs' is a value"):
        compose(config_dir, "train", {"num_envs.x": 1})


def test_dataclass_is_built_and_converted() -> None:
    options = from_mapping(
        Options,
        {"steps": 1e6, "learning_rate": 1, "network": {"hidden": [32]}, "bounds": [0, 2], "extra": {"a": 1}},
    )
    assert options == Options(1_000_000, 1.0, network=Network((32,)), bounds=(0.0, 2.0), extra={"a": 1.0})
    assert isinstance(options.steps, int)
    assert isinstance(options.bounds[1], float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "abc"}, r"^o\.steps: got 'abc', allowed is an integer\.$"),
        ({"steps": 1.5}, r"o\.steps: got 1\.5, allowed is an integer"),
        ({"steps": True}, r"o\.steps: got True, allowed is an integer"),
        ({"steps": None}, r"o\.steps: got null"),
        ({"steps": 0}, r"o: steps=0 is not allowed: it must be >= 1"),
        ({}, r"o\.steps is missing: it needs an integer"),
        ({"steps": 1, "learnin_rate": 1}, r"unknown key 'o\.learnin_rate'\. Did you mean 'o\.learning_rate'\?"),
        ({"steps": 1, "zzz": 1}, r"unknown key 'o\.zzz'\. Allowed: o\.bounds, o\.extra"),
        ({"steps": 1, "fast": 1}, r"o\.fast: got 1, allowed is true or false"),
        ({"steps": 1, "learning_rate": float("nan")}, r"o\.learning_rate: got nan"),
        ({"steps": 1, "resume": 3}, r"o\.resume: got 3, allowed is text or null"),
        ({"steps": 1, "network": 3}, r"o\.network: got 3, allowed is a section"),
        ({"steps": 1, "network": {"hiden": [1]}}, r"Did you mean 'o\.network\.hidden'"),
        ({"steps": 1, "network": {"hidden": [1, "a"]}}, r"o\.network\.hidden\[1\]: got 'a'"),
        ({"steps": 1, "network": {"hidden": 64}}, r"o\.network\.hidden: got 64, allowed is a list, each an integer"),
        ({"steps": 1, "network": {"activation": "rellu"}}, r"one of elu, relu\. Did you mean 'relu'\?"),
        ({"steps": 1, "bounds": [1]}, r"o\.bounds: got \[1\], allowed is a list of 2"),
        ({"steps": 1, "extra": {"a": "b"}}, r"o\.extra\.a: got 'b', allowed is a number"),
        ({"steps": 1, "extra": 1}, r"o\.extra: got 1"),
    ],
)
def test_messages_of_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_mapping(Options, values, "o")


def test_at_least_knows_strict_bounds_and_none() -> None:
    at_least("x", None, 0)
    at_least("x", 0, 0)
    with pytest.raises(UserError, match="x=0 is not allowed: it must be > 0"):
        at_least("x", 0, 0, exclusive=True)


def test_nesting() -> None:
    assert nest({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
    with pytest.raises(UserError):
        nest({"a": 1, "a.b": 2})
    root: dict[str, Any] = {"a": {"b": 0}}
    apply_values(root, {"a.b": 1})
    assert root == {"a": {"b": 1}}


def test_descriptions_of_types() -> None:
    assert describe(int | None) == "an integer or null"
    assert describe(tuple[float, float]) == "a list of 2: a number, a number"
