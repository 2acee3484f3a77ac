"""From ``key=value`` words to checked dataclasses: parse, compose the config groups, convert, complain well.

    argv ── parse_overrides ──► {key: value} ── compose ──► nested mapping ── from_mapping ──► dataclass

Precedence, low to high: dataclass defaults, the group's YAML, ``tuned`` settings of the task's YAML, ``with_init``
settings where ``init`` is given, both for this ``<policy>-<algo>`` pair, the command line. The dataclasses are the
schema: a YAML file lists only what differs.
Everything that a user can get wrong raises UserError with the key, what it got and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied.core.errors import UserError, nearest, unknown_name

T = TypeVar("T")
GROUPS = ("task", "policy", "algo", "runtime", "sim", "sampler")


# ---------------------------------------------------------------------------------------------- words → values
def parse_overrides(argv: Sequence[str]) -> dict[str, Any]:
    """``["num_envs=64", "algo.gamma=0.9"]`` → ``{"num_envs": 64, "algo.gamma": 0.9}`` in Hydra's value grammar.

    A later word wins over an earlier one. UserError if a word is not ``key=value`` or its value does not parse.
    """
    parser = OverridesParser.create()
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"'{word}' is not key=value: write for instance num_envs=64, without spaces around '='")
        try:
            override = parser.parse_override(word)
        except HydraException:
            raise UserError(
                f"cannot read the value of {key}: got {text!r}. Quote special characters for the shell and for the "
                f"value, as in '{key}=\"{text}\"'"
            ) from None
        if override.is_delete() or override.is_sweep_override() or override.package is not None:
            raise UserError(f"'{word}': only plain key=value is allowed here: no deletion, sweep or package")
        if override.key_or_group.startswith(".") or override.key_or_group.endswith(".") or ".." in key:
            raise UserError(f"'{word}': '{override.key_or_group}' is not a key")
        values[override.key_or_group] = override.value()
    return values


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"algo.gamma": 0.9}`` → ``{"algo": {"gamma": 0.9}}``; UserError if a key is both a value and a section."""
    root: dict[str, Any] = {}
    apply_values(root, values)
    return root


def apply_values(root: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set dotted keys in a nested dictionary, in place, later ones last."""
    for dotted, value in values.items():
        *sections, last = dotted.split(".")
        node = root
        for depth, section in enumerate(sections):
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(f"{dotted}: '{'.'.join(sections[: depth + 1])}' is a value, it has no '{last}'")
        node[last] = value


# ---------------------------------------------------------------------------------------------- groups → mapping
def compose(config_dir: Path, name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration as a nested dictionary of plain values.

    config_dir: absolute, holds ``<name>.yaml`` and one folder per config group. A group's choice is ``task=reach``,
    a value inside it ``task.goal_tolerance_m=0.01``. UserError with the nearest name for an unknown choice.
    """
    choices: dict[str, str] = {}
    values = dict(overrides)
    for group in GROUPS:
        if group in values:
            choice = values.pop(group)
            choices[group] = _known_choice(config_dir / group, choice)
    try:
        config = _compose_groups(config_dir, name, choices)
        pairs, pair = _pairs(config_dir), f"{config.policy.name}-{config.algo.name}"
        with_init = _entry(config.pop("with_init", None), pair, pairs, "'with_init'")
        tuned = _entry(config.task.pop("tuned", None), pair, pairs, f"'tuned' of task {config.task.name}")
        if values.get("init") is None:
            with_init = {}
        tree = OmegaConf.to_container(OmegaConf.merge(config, tuned, with_init), resolve=False)
        assert isinstance(tree, dict)
        apply_values(typing.cast(dict[str, Any], tree), values)
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"configuration '{name}': {error}") from error
    return typing.cast(dict[str, Any], resolved)


def _known_choice(folder: Path, choice: Any) -> str:
    """``choice`` if the group has a file for it, or if it is ``<family>/<id>``; UserError with the nearest name."""
    allowed = sorted(path.stem for path in folder.glob("*.yaml"))
    if not isinstance(choice, str) or (choice not in allowed and "/" not in choice):
        raise unknown_name(folder.name, str(choice), allowed)
    return choice


def _compose_groups(config_dir: Path, name: str, choices: Mapping[str, str]) -> DictConfig:
    """The groups' files together; a choice without a file is a section of its name alone."""
    bare = {group: choice for group, choice in choices.items() if not (config_dir / group / f"{choice}.yaml").is_file()}
    overrides = [f"~{group}" if group in bare else f"{group}={choice}" for group, choice in choices.items()]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        config = hydra_compose(name, overrides=overrides)
    OmegaConf.set_struct(config, False)
    for group, choice in bare.items():
        config[group] = {"name": choice}
    return config


def _pairs(config_dir: Path) -> list[str]:
    """Every ``<policy>-<algo>`` that can be chosen."""
    policies, algos = (
        sorted(path.stem for path in (config_dir / group).glob("*.yaml")) for group in ("policy", "algo")
    )
    return [f"{policy}-{algo}" for policy in policies for algo in algos]


def _entry(entries: DictConfig | None, pair: str, pairs: Sequence[str], where: str) -> dict[str, Any]:
    """The settings for ``pair`` among those that a YAML file has for pairs; UserError if one of them is not a pair."""
    entries = entries or DictConfig({})
    for name in entries:
        if name not in pairs:
            raise unknown_name(f"policy and algorithm in {where}", str(name), pairs)
    entry = entries.get(pair, {})
    return typing.cast(dict[str, Any], OmegaConf.to_container(entry) if OmegaConf.is_config(entry) else entry)


# ---------------------------------------------------------------------------------------------- mapping → dataclass
def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Build a config dataclass, checking every name and type; ``path`` is the prefix of keys in messages.

    int fields take integral numbers (``1e6``), float fields any number, tuples and lists a list, nested dataclasses a
    mapping. A ValueError from ``__post_init__`` is reported under ``path``.
    """
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls, include_extras=False)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in mapping:
        if key not in fields:
            suggestion = nearest(str(key), fields)
            hint = f" Did you mean '{_join(path, suggestion)}'?" if suggestion else ""
            raise UserError(
                f"unknown key '{_join(path, key)}'.{hint} Allowed: "
                + ", ".join(sorted(_join(path, name) for name in fields))
            )
    arguments = {key: convert(value, hints[key], _join(path, key)) for key, value in mapping.items()}
    for field_name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field_name not in arguments:
            needed = describe(hints[field_name])
            raise UserError(f"{_join(path, field_name)} is missing: it needs {needed}, {_join(path, field_name)}=...")
    try:
        return typing.cast(T, cls(**arguments))
    except ValueError as error:
        message = str(error)
        raise UserError(message if not path or f"{path}." in message else f"{path}: {message}") from error


def convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as the annotated type ``hint``; UserError naming ``path`` if it is not of that type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, args, path)
    if origin is Literal:
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        suggestion = nearest(str(value), [str(arg) for arg in args])
        raise _wrong(value, hint, path, f" Did you mean '{suggestion}'?" if suggestion else "")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_mapping(hint, value, path)
        raise _wrong(value, hint, path)
    if origin in (tuple, list, Sequence) or (hint in (tuple, list)):
        return _convert_sequence(value, hint, origin or hint, args, path)
    if (origin or hint) in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(value, hint, path)
        return {key: convert(item, args[1] if args else Any, _join(path, key)) for key, item in value.items()}
    return _convert_scalar(value, hint, path)


def _convert_union(value: Any, hint: Any, args: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in args:
        return None
    options = [arg for arg in args if arg is not type(None)]
    for option in options:
        try:
            return convert(value, option, path)
        except UserError:
            if len(options) == 1 and not isinstance(value, str | int | float | bool):
                raise  # the inner message names the inner key
    raise _wrong(value, hint, path)


def _convert_sequence(value: Any, hint: Any, kind: Any, args: tuple[Any, ...], path: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(value, hint, path)
    if kind is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise _wrong(value, hint, path)
        item_hints = list(args)
    else:
        item_hints = [args[0] if args else Any] * len(value)
    items = [convert(item, h, f"{path}[{i}]") for i, (item, h) in enumerate(zip(value, item_hints, strict=True))]
    return tuple(items) if kind is tuple else items


def _convert_scalar(value: Any, hint: Any, path: str) -> Any:
    is_bool = isinstance(value, bool)
    if hint is bool and is_bool:
        return value
    if hint is int and not is_bool:
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    if hint is float and not is_bool and isinstance(value, int | float) and not math.isnan(value):
        return float(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if hint is str and isinstance(value, str):
        return value
    if hint not in (bool, int, float, str, Path) and isinstance(value, hint):
        return value
    raise _wrong(value, hint, path)


def describe(hint: Any) -> str:
    """A type annotation in a user's words: ``int | None`` → "an integer or null"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
    if hint in words:
        return words[hint]
    if hint is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(describe(arg) for arg in args)}"
    if origin in (tuple, list, Sequence) or hint in (tuple, list):
        return f"a list, each {describe(args[0])}" if args else "a list"
    return "a section with keys"


def at_least(name: str, value: float | None, minimum: float, exclusive: bool = False) -> None:
    """UserError unless value is None, or >= minimum (> if exclusive). For ``__post_init__`` of configs."""
    if value is not None and (value < minimum or (exclusive and value == minimum)):
        raise UserError(f"{name}={value} is not allowed: it must be {'>' if exclusive else '>='} {minimum}")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _wrong(value: Any, hint: Any, path: str, extra: str = "") -> UserError:
    got = "null" if value is None else repr(value)
    return UserError(f"{path}: got {got}, allowed is {describe(hint)}.{extra}")
