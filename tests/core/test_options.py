"""Dataclasses of options: what is converted, what is refused, and messages that help, from YAML and from Python."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, field, replace
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import (
    FractionBelow1,
    Positive,
    PositiveInt,
    Text,
    Widths,
    config_dataclass,
    from_mapping,
    one_of,
)

METHODS = {"euler": 1, "heun": 2}


@config_dataclass
class Network:
    hidden: Widths = (64, 64)
    activation: Literal["elu", "relu"] = "elu"
    sigma_min: Positive = 0.1
    sigma_max: Positive = 1.0

    def __post_init__(self) -> None:
        if self.sigma_min >= self.sigma_max:
            raise UserError(f"sigma_min: got {self.sigma_min}, allowed: below sigma_max={self.sigma_max}")
        if self.hidden == (13,):
            raise UserError("thirteen brings bad luck")


@config_dataclass
class Options:
    steps: PositiveInt
    learning_rate: float = 3e-4
    name: Text = "x"
    resume: str | None = None
    fast: bool = False
    network: Network = field(default_factory=Network)
    bounds: tuple[float, float] = (0.0, 1.0)
    extra: dict[str, float] = field(default_factory=dict)
    networks: dict[str, Network] = field(default_factory=dict)
    decay: FractionBelow1 | None = None
    method: Annotated[str, one_of(METHODS)] = "euler"
    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("front",)
    anything: dict[str, Any] = field(default_factory=dict)


def test_values_are_converted_where_nothing_is_lost() -> None:
    values: dict[str, Any] = {
        "steps": 1e6, "learning_rate": 1, "network": {"hidden": [32.0]}, "bounds": [0, 2], "extra": {"a": 1},
        "networks": {"b": {}}, "decay": 0, "anything": {"a": [1.0, {"b": None}]},
    }  # fmt: skip
    options = from_mapping(Options, values)
    assert options == Options(
        1_000_000, 1.0, network=Network((32,)), bounds=(0.0, 2.0), extra={"a": 1.0}, networks={"b": Network()},
        decay=0.0, anything={"a": [1.0, {"b": None}]},
    )  # fmt: skip
    assert [type(value) for value in (options.steps, options.network.hidden[0], options.bounds[1])] == [int, int, float]


WRONG = [
    ({"steps": "abc"}, r"^o\.steps: got 'abc', allowed: an integer$"),
    ({"steps": "3"}, r"^o\.steps: got '3', allowed: an integer$"),
    ({"steps": 1.5}, r"o\.steps: got 1\.5, allowed: an integer"),
    ({"steps": True}, r"o\.steps: got True, allowed: an integer"),
    ({"steps": None}, r"o\.steps: got null, allowed: an integer"),
    ({"steps": 0}, r"^o\.steps: got 0, allowed: at least 1$"),
    ({}, r"o\.steps is missing: give o\.steps="),
    ({"stps": 1}, r"unknown key 'o\.stps'\. Did you mean 'o\.steps'\?"),
    ({"steps": 1, "learnin_rate": 1}, r"unknown key 'o\.learnin_rate'\. Did you mean 'o\.learning_rate'\?"),
    ({"steps": 1, "zzz": 1}, r"unknown key 'o\.zzz'\. Allowed: o\.anything, o\.bounds, o\.cameras"),
    ({"steps": 1, "fast": 1}, r"o\.fast: got 1, allowed: true or false"),
    ({"steps": 1, "fast": "true"}, r"o\.fast: got 'true', allowed: true or false"),
    ({"steps": 1, "learning_rate": "1"}, r"o\.learning_rate: got '1', allowed: a number"),
    ({"steps": 1, "learning_rate": True}, r"o\.learning_rate: got True, allowed: a number"),
    ({"steps": 1, "learning_rate": float("nan")}, r"o\.learning_rate: got nan, allowed: a finite number"),
    ({"steps": 1, "learning_rate": float("inf")}, r"o\.learning_rate: got inf, allowed: a finite number"),
    ({"steps": 1, "name": 3}, r"o\.name: got 3, allowed: text"),
    ({"steps": 1, "name": " "}, r"o\.name: got ' ', allowed: text that is not blank"),
    ({"steps": 1, "resume": 3}, r"o\.resume: got 3, allowed: text or null"),
    ({"steps": 1, "decay": 1}, r"o\.decay: got 1, allowed: at least 0 and below 1 or null"),
    ({"steps": 1, "method": "hoin"}, r"o\.method: got 'hoin', allowed: euler, heun\. Did you mean 'heun'\?"),
    ({"steps": 1, "cameras": []}, r"o\.cameras: got \[\], allowed: 1 or more entries"),
    ({"steps": 1, "network": 3}, r"o\.network: got 3, allowed: a section with keys"),
    ({"steps": 1, "network": {"hiden": [1]}}, r"Did you mean 'o\.network\.hidden'"),
    ({"steps": 1, "network": {"hidden": [1, "a"]}}, r"o\.network\.hidden\[1\]: got 'a', allowed: an integer"),
    ({"steps": 1, "network": {"hidden": [1, 0]}}, r"o\.network\.hidden\[1\]: got 0, allowed: at least 1"),
    ({"steps": 1, "network": {"hidden": 64}}, r"o\.network\.hidden: got 64, allowed: a list"),
    ({"steps": 1, "network": {"activation": "rellu"}}, r"allowed: 'elu' or 'relu'\. Did you mean 'relu'\?"),
    ({"steps": 1, "network": {"sigma_min": 2}}, r"^o\.network\.sigma_min: got 2\.0, allowed: below sigma_max=1\.0$"),
    ({"steps": 1, "network": {"hidden": [13]}}, r"^o\.network: thirteen brings bad luck$"),
    ({"steps": 1, "networks": {"a": {"hiden": [1]}}}, r"key 'o\.networks\.a\.hiden'\. .* 'o\.networks\.a\.hidden'"),
    ({"steps": 1, "bounds": [1]}, r"o\.bounds: got \[1\], allowed: a list of 2"),
    ({"steps": 1, "bounds": [1, 2, 3]}, r"o\.bounds: got \[1, 2, 3\], allowed: a list of 2"),
    ({"steps": 1, "extra": {"a": "b"}}, r"o\.extra\.a: got 'b', allowed: a number"),
    ({"steps": 1, "extra": 1}, r"o\.extra: got 1, allowed: a section with keys"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_messages_of_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_mapping(Options, values, "o")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "abc"}, r"^steps: got 'abc', allowed: an integer$"),
        ({}, r"^steps is missing: give steps="),
        ({"stps": 1}, r"^unknown key 'stps'\. Did you mean 'steps'\?"),
        ({"steps": 1, "network": {"sigma_min": 2}}, r"^network\.sigma_min: got 2\.0, allowed: below sigma_max=1\.0$"),
        ({"steps": 1, "network": {"hidden": [13]}}, r"^network: thirteen brings bad luck$"),
    ],
)
def test_a_constructor_refuses_the_same(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(**values)


def test_arguments_without_names_and_changed_copies_are_checked() -> None:
    with pytest.raises(UserError, match=r"^steps: got 0, allowed: at least 1$"):
        Options(0)
    with pytest.raises(UserError, match=r"^steps: got -1"):
        replace(Options(1), steps=-1)


def test_a_subclass_inherits_and_narrows() -> None:
    @config_dataclass
    class Deep(Network):
        hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=3)] = (8, 8, 8)

    assert from_mapping(Deep, {"sigma_min": 0.5}) == Deep(sigma_min=0.5)
    with pytest.raises(UserError, match=r"hidden: got .* 3 or more entries"):
        Deep((8, 8))
    with pytest.raises(UserError, match="sigma_min"):
        Deep(sigma_min=2.0)


def test_they_are_frozen_dataclasses() -> None:
    options = Options(1)
    with pytest.raises(FrozenInstanceError):
        options.steps = 2  # type: ignore[misc]
    assert copy.deepcopy(options) == options == from_mapping(Options, asdict(options))


def test_it_needs_neither_torch_nor_hydra() -> None:
    code = "import embodied.core.options, sys; print({'torch', 'hydra', 'omegaconf', 'mujoco'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
