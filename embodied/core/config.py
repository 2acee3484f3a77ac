"""Parse ``key=value`` words and compose the config groups into one nested mapping.

    argv ── parse_overrides ──► {key: value} ── compose ──► nested mapping ── options.from_mapping ──► dataclass

Precedence, low to high: defaults of the dataclasses; YAML files of the groups; those of presets; ``tuned`` settings of
the policy's YAML for this ``<policy>-<algo>`` pair; values derived from the task (embodied/session/defaults.py);
``tuned`` settings of the task's YAML; ``with_init`` settings for the pair, if ``init`` is given; the command line. The
dataclasses are the schema: a YAML file lists only what differs from them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied.core.errors import UserError, unknown_name

GROUPS = ("task", "policy", "algo", "runtime", "sim", "sampler")
HOME = "~/"
PRESETS = "randomization"
"""Group whose files hold settings of the section ``sim``."""


def parse_overrides(argv: Sequence[str]) -> dict[str, Any]:
    """Parse ``["num_envs=64", "algo.gamma=0.9"]`` to ``{"num_envs": 64, "algo.gamma": 0.9}`` in Hydra's grammar.

    A later word overrides an earlier one, and ``~/`` at the beginning of a value is the home directory. UserError if a
    word is not ``key=value`` or its value does not parse.
    """
    parser = OverridesParser.create()
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if equals and word.startswith("-"):
            raise UserError(f"'{word}' is not key=value: write {word.lstrip('-')}")
        if not equals or not key:
            raise UserError(f"'{word}' is not key=value: write for instance num_envs=64, without spaces around '='")
        cure = f"Quote a text for the shell and for the value, as in '{key}=\"{text}\"'"
        try:
            override = parser.parse_override(f'{key}="{text}"' if text.startswith(HOME) else word)
        except HydraException:
            raise UserError(f"cannot read the value of {key}: got {text!r}. {cure}") from None
        if override.is_sweep_override() and "," in text:
            several = "several values, where one is allowed"
            raise UserError(f"{key}: got {text!r}, {several}. {cure}; a list is '{key}=[{text}]'")
        if override.is_delete() or override.is_sweep_override() or override.package is not None:
            raise UserError(f"'{word}': only plain key=value is allowed here: no deletion, sweep or package")
        if override.key_or_group.startswith(".") or override.key_or_group.endswith(".") or ".." in key:
            raise UserError(f"'{word}': '{override.key_or_group}' is not a key")
        value: Any = override.value()
        at_home = isinstance(value, str) and value.startswith(HOME)
        values[override.key_or_group] = str(Path(value).expanduser()) if at_home else value
    return values


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"algo.gamma": 0.9}`` into nested sections. UserError if a key is both a value and a section."""
    root: dict[str, Any] = {}
    apply_values(root, values)
    return root


def apply_values(root: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set dotted keys in a nested dictionary, in place and in order. UserError if a section is a value."""
    for dotted, value in values.items():
        *sections, last = dotted.split(".")
        node = root
        for depth, section in enumerate(sections):
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UserError(f"{dotted}: '{'.'.join(sections[: depth + 1])}' is a value, it has no '{last}'")
        node[last] = value


def compose(
    config_dir: Path,
    overrides: Mapping[str, Any],
    names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    derived: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Compose the configuration of a run with overrides; return a nested dictionary of plain values.

    config_dir: absolute path with ``train.yaml`` and one folder per config group. An override chooses from a group
    (``task=reach``) or sets a value in it (``task.goal_tolerance_m=0.01``). names: of each group, that need no file.
    derived: nested values from the task. UserError with the nearest name for an unknown choice.
    """
    values = dict(overrides)
    choices = {
        group: _known_choice(config_dir / group, values.pop(group), names.get(group, ()))
        for group in GROUPS
        if group in values
    }
    preset = {"sim": read_preset(config_dir, values.pop(PRESETS))} if PRESETS in values else {}
    try:
        config = _compose_groups(config_dir, choices)
        pair = f"{config.policy.name}-{config.algo.name}"
        of_policy, of_task = (
            _settings_of_pair(config_dir, section.pop("tuned", None), pair, f"'tuned' of {group} {section.name}")
            for group, section in (("policy", config.policy), ("task", config.task))
        )
        with_init = _settings_of_pair(config_dir, config.pop("with_init", None), pair, "'with_init'")
        of_init = {} if values.get("init") is None else with_init
        merged = OmegaConf.merge(config, preset, of_policy, dict(derived), of_task, of_init)
        tree: Any = OmegaConf.to_container(merged, resolve=False)
        apply_values(tree, values)
        resolved: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"configuration 'train': {error}") from error
    return dict(resolved)


def read_preset(config_dir: Path, choice: Any) -> dict[str, Any]:
    """Return the settings of a preset of randomisation. UserError with the nearest name for an unknown one."""
    folder = config_dir / PRESETS
    settings: Any = OmegaConf.to_container(OmegaConf.load(folder / f"{_known_choice(folder, choice, ())}.yaml"))
    return dict(settings)


def _known_choice(folder: Path, choice: Any, others: Sequence[str]) -> str:
    """Return ``choice`` if the group has it, or it is a task ``<family>/<id>``. UserError with the nearest name."""
    allowed = sorted({*(path.stem for path in folder.glob("*.yaml")), *others})
    if isinstance(choice, str) and (choice in allowed or (folder.name == "task" and "/" in choice)):
        return choice
    raise unknown_name(folder.name, str(choice), allowed)


def _compose_groups(config_dir: Path, choices: Mapping[str, str]) -> DictConfig:
    """Compose the files of the groups; a choice without a file becomes a section that holds only its name."""
    bare = {group: choice for group, choice in choices.items() if not (config_dir / group / f"{choice}.yaml").is_file()}
    overrides = [f"~{group}" if group in bare else f"{group}={choice}" for group, choice in choices.items()]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        config = hydra_compose("train", overrides=overrides)
    OmegaConf.set_struct(config, False)
    for group, choice in bare.items():
        config[group] = {"name": choice}
    return config


def _settings_of_pair(config_dir: Path, entries: DictConfig | None, pair: str, where: str) -> DictConfig:
    """Return the settings for a ``<policy>-<algo>`` pair. UserError if one is for a pair that does not exist."""
    policies, algos = ([path.stem for path in (config_dir / group).glob("*.yaml")] for group in ("policy", "algo"))
    pairs = [f"{policy}-{algo}" for policy in policies for algo in algos]
    for name in entries or ():
        if name not in pairs:
            raise unknown_name(f"policy and algorithm in {where}", str(name), pairs)
    return (entries or DictConfig({})).get(pair) or DictConfig({})
