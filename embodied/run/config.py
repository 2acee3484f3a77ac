"""A run's configuration: composed from overrides, read from a run directory, checked and completed.

overrides ──► compose_run ──► RunConfig ──► factories.make_env, make_policy, make_algorithm ──► a runtime
                  run directory ──► read_run ──┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import embodied
from algos import ALGORITHMS
from embodied.core.config import GROUPS, apply_values, at_least, compose, from_mapping
from embodied.core.errors import UserError, unknown_name
from embodied.runtime import RuntimeConfig
from envs import TASKS, SimConfig
from policies import POLICIES

CONFIG_DIR = Path(embodied.__file__).resolve().parents[1] / "configs"
CONFIG_FILE = "config.yaml"
PRETRAINED = "pretrained"  # folder of a run whose policy wraps another library's model
SHORTHANDS = {"max_staleness": "runtime.max_staleness", "device": "runtime.device"}
CHANGEABLE = ("total_steps", "max_minutes", "stop_at_success", "eval_episodes", "checkpoint_minutes")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides a run; ``config.yaml`` of its directory. Sections are complete, no default left out.

    total_steps: control steps of all envs together. max_minutes: of wall-clock, including set-up; None is no limit.
    Both count the whole run, across resumes. seed: of networks, envs, exploration and the final evaluation.
    out: run directory, None is ``runs/<task>/<policy>-<algo>-<time>``. eval_episodes: of the final evaluation, 0 for
    none. checkpoint_minutes: between two checkpoints. stop_at_success: end early when an evaluation during training
    has at least this success at the end of episodes, of those whose instructions are trained on. data: demonstrations,
    for an algorithm that learns from them. data_keys: what they call ``state`` and ``action``, where it is not
    observation.state and action. init: run directory whose policy training starts from.
    """

    task: dict[str, Any]
    policy: dict[str, Any]
    algo: dict[str, Any]
    runtime: dict[str, Any]
    sim: dict[str, Any]
    num_envs: int
    total_steps: int
    max_minutes: float | None = None
    seed: int = 0
    out: str | None = None
    eval_episodes: int = 200
    checkpoint_minutes: float = 2.0
    stop_at_success: float | None = None
    data: str | None = None
    data_keys: dict[str, str] = field(default_factory=dict)
    init: str | None = None

    def __post_init__(self) -> None:
        at_least("num_envs", self.num_envs, 1)
        at_least("total_steps", self.total_steps, 1)
        at_least("max_minutes", self.max_minutes, 0, exclusive=True)
        at_least("seed", self.seed, 0)
        at_least("eval_episodes", self.eval_episodes, 0)
        at_least("checkpoint_minutes", self.checkpoint_minutes, 0)
        at_least("stop_at_success", self.stop_at_success, 0, exclusive=True)
        if self.stop_at_success is not None and self.stop_at_success > 1:
            raise UserError(f"stop_at_success={self.stop_at_success} is not allowed: it is a rate, at most 1")
        if self.out is not None and not self.out.strip():
            raise UserError("out is empty: it must name a directory that does not exist yet")
        if self.group_size > 1:
            self._check_groups()

    def _check_groups(self) -> None:
        """UserError unless groups of envs fit into the runtime's, and episodes into fragments."""
        env_groups = self.runtime["num_workers"] * self.runtime["groups_per_worker"]
        if self.num_envs % (env_groups * self.group_size):
            raise UserError(
                f"algo.group_size={self.group_size} does not divide the envs of a group of the runtime: num_envs must "
                f"be a multiple of {env_groups * self.group_size} (group_size * num_workers * groups_per_worker), got "
                f"{self.num_envs}"
            )
        steps, execute = self.task["max_episode_steps"], self.policy["execute"]
        if self.runtime["decisions"] * execute != steps:
            fits = "" if steps % execute else f": set runtime.decisions={steps // execute}"
            raise UserError(
                f"algo={self.algo['name']} compares whole episodes, so runtime.decisions * policy.execute must be the "
                f"{steps} steps of task {self.task['name']}, got {self.runtime['decisions']} * {execute}{fits}"
            )

    @property
    def group_size(self) -> int:
        """Training envs that share their episodes, 1 unless the algorithm compares such groups."""
        return int(self.algo.get("group_size", 1))

    @property
    def title(self) -> str:
        """``<policy>-<algo>``, as in the default run directory and in ``tuned`` sections of task files."""
        return f"{self.policy['name']}-{self.algo['name']}"

    def runtime_config(self) -> RuntimeConfig:
        return from_mapping(RuntimeConfig, self.runtime, "runtime")


def compose_run(overrides: Mapping[str, Any]) -> RunConfig:
    """The configuration of a new run from ``key=value`` overrides (see embodied.core.config for precedence)."""
    return resolve(compose(CONFIG_DIR, "train", _expand(overrides)))


def read_run(run_dir: Path) -> RunConfig:
    """The configuration that a run was started with. UserError if the directory is not a run's."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        kind = "has no config.yaml, so it is not a run directory" if run_dir.is_dir() else "is not a directory"
        raise UserError(f"'{run_dir}' {kind}: give the directory that train wrote, such as runs/reach/flow-ppo-...")
    try:
        mapping = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(mapping, dict) or any(not isinstance(mapping.get(group), dict) for group in GROUPS):
        raise UserError(f"{path} is not the configuration of a run: it needs the sections {', '.join(GROUPS)}")
    return with_architecture(resolve({str(key): value for key, value in mapping.items()}), run_dir)


def with_architecture(config: RunConfig, run_dir: Path) -> RunConfig:
    """The configuration with ``policy.pretrained`` at the copy of model and tokenizer that a run keeps, if it does."""
    kept = run_dir / PRETRAINED
    if "pretrained" not in config.policy or not kept.is_dir():
        return config
    return replace(config, policy=config.policy | {"pretrained": str(kept)})


def resume_run(run_dir: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """A run's configuration with what may change when it goes on; UserError for what may not."""
    config = to_mapping(read_run(run_dir))
    changes = {}
    for key, value in _expand(overrides).items():
        section, _, option = key.partition(".")
        before: Any = config.get(section)
        if section in GROUPS:
            before = before.get(option) if option else before.get("name")
        if value == before:
            continue
        free = key in CHANGEABLE or (section in ("algo", "runtime") and option not in ("", "name", "group_size"))
        if section in config and not free:
            raise UserError(
                f"{key} cannot change when a run is resumed: it is {before!r}, got {value!r}. "
                f"Allowed: {', '.join(CHANGEABLE)} and options of algo and runtime"
            )
        changes[key] = value
    apply_values(config, changes)
    return resolve(config)


def resolve(mapping: Mapping[str, Any]) -> RunConfig:
    """Check every name and type of a composed configuration, and fill its sections with all defaults."""
    sections = {
        "task": _complete(mapping["task"], TASKS[mapping["task"]["name"]].config, "task"),
        "policy": _complete(mapping["policy"], POLICIES[mapping["policy"]["name"]].config, "policy"),
        "algo": _complete(mapping["algo"], ALGORITHMS[mapping["algo"]["name"]].config, "algo"),
        "runtime": _complete(mapping["runtime"], RuntimeConfig, "runtime"),
        "sim": _complete(mapping["sim"], SimConfig, "sim"),
    }
    known = {field.name for field in fields(RunConfig)}
    for key in mapping:
        if key not in known:
            inner = [f"{group}.{key}" for group in GROUPS if key in sections[group]]
            if inner:
                raise UserError(f"unknown key '{key}'. Did you mean '{inner[0]}'?")
            raise unknown_name("key", key, known | set(SHORTHANDS) | {"resume"})
    return from_mapping(RunConfig, {**mapping, **sections})


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values, the content of ``config.yaml``."""
    return asdict(config)


def to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))


def _expand(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {SHORTHANDS.get(key, key): value for key, value in overrides.items()}


def options_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section of the configuration without its ``name``."""
    return {key: value for key, value in section.items() if key != "name"}


def _complete(section: Mapping[str, Any], config: type[Any], path: str) -> dict[str, Any]:
    """``section`` with the defaults of its config dataclass, checked; ``name`` stays first."""
    has_name = any(field.name == "name" for field in fields(config))
    options = section if has_name else options_of(section)
    return {"name": section.get("name"), **asdict(from_mapping(config, options, path))}
