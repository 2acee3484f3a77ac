"""A run's configuration: composed from overrides, read from a run directory, checked and completed.

overrides ──► compose_run ──► RunConfig ──► factories.make_env, make_policy, make_algorithm ──► a runtime
                  run directory ──► read_run ──┘
"""

from collections.abc import Mapping
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import Field

import embodied
from embodied.algos.registry import ALGORITHMS
from embodied.core import user_files
from embodied.core.config import GROUPS, PRESETS, apply_values, compose, read_preset
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
    Text,
    config_dataclass,
    from_mapping,
)
from embodied.core.registry import Registry
from embodied.envs.episodes.registry import SAMPLERS
from embodied.envs.mujoco.robot_file import robot_randomization
from embodied.envs.registry import DEFAULT_FAMILY, FAMILIES, TASKS, sim_options, split_name
from embodied.policies.config import ARCHITECTURE, POLICIES
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.registry import RUNTIMES
from embodied.session.files import CHANGEABLE, CONFIG_FILE, read_sections

CONFIG_DIR = Path(embodied.__file__).parent / "configs"
ASSETS = "embodied/assets/"  # runs below it are found wherever this package is installed
PRETRAINED = "pretrained"  # folder of a run whose policy wraps another library's model
SHORTHANDS = {"max_staleness": "runtime.max_staleness", "device": "runtime.device", "trace": "runtime.trace"}
SIM2REAL, RANDOMIZED = "sim2real", "randomization"  # a preset, and its terms in the section ``sim``
FILES = ("robot", "robots", "scene")  # options of a task that may name files; robots by side
OF_OTHERS: dict[str, Registry[Any]] = {"task": TASKS, "policy": POLICIES, "algo": ALGORITHMS, "sampler": SAMPLERS}
"""Registries of the groups whose names other distributions may add to; these have no file."""
DECISIONS = 4  # default of runtime.decisions; with chunks of 4 actions, 16 control steps


@config_dataclass
class Section:
    """A part that the configuration names, and its options."""

    name: str
    options: Any
    """Instance of the dataclass that the part is registered with."""

    @property
    def title(self) -> str:
        """The name for people and for names of folders."""
        return user_files.short_name(self.name)

    def to_mapping(self) -> dict[str, Any]:
        """Return the section as plain values, as in ``config.yaml``."""
        return {"name": self.name, **asdict(self.options)}


@config_dataclass
class RunConfig:
    """All options of a run, as in ``config.yaml`` of its directory."""

    task: Section
    policy: Section
    algo: Section
    runtime: RuntimeConfig
    """The runtime; its options include its name."""
    sim: Section
    sampler: Section
    """The sampler of training episodes."""
    num_envs: PositiveInt
    """Training envs, over all workers."""
    total_steps: PositiveInt
    """Control steps of all envs together, across resumes."""
    max_minutes: Positive | None = None
    """Wall-clock minutes across resumes, including set-up, while the process is not stopped; null is no limit."""
    seed: Seed = 0
    """Seed of networks, envs, exploration and the final evaluation."""
    out: Text | None = None
    """Run directory, which must not exist yet; null is ``runs/<task>/<policy>-<algo>-<time>``."""
    eval_episodes: NonNegativeInt = 200
    """Episodes of the evaluation at the end; 0 for none."""
    checkpoint_minutes: NonNegative = 2.0
    stop_at_success: Annotated[float, Field(gt=0, le=1)] | None = None
    """End early when an evaluation during training reaches this rate of success at the end of episodes, and a second
    one on fresh episodes too; null is never. If instructions are held out, only those that are trained on count."""
    cut_after_success: NonNegativeInt = 0
    """Control steps of success in a row after which an episode of training ends, as a truncation; 0: none does. What is
    solved is then seen for a shorter time, and what is not for a longer one. Of every eighth env seed none ends so, or
    the critic would not learn what it is worth to stay solved. Evaluations have whole episodes."""
    repeat_failures: Fraction = 0.0
    """Share of the episodes of training that begin as one that failed lately, so that what is not learned yet is seen
    more often; none while all fail. ``rollout/success_at_end`` counts them, so it is lower than in evaluations."""
    data: str | None = None
    """Demonstrations, for an algorithm that learns from them."""
    data_keys: dict[str, Any] = field(default_factory=dict)
    """Columns ``state`` and ``action`` of the demonstrations (embodied/data/columns.py): a name, by default
    observation.state and action, or options that also convert the numbers."""
    init: str | None = None
    """Run directory whose policy training starts from."""

    @property
    def group_size(self) -> int:
        """Number of training envs with the same episodes; 1 unless the algorithm compares such groups."""
        return int(getattr(self.algo.options, "group_size", 1))

    @property
    def max_delay(self) -> int:
        """Greatest delay of inference that the policy knows of, control steps; 0 for a policy without delays."""
        return int(getattr(self.policy.options, "max_delay", 0))

    @property
    def robot(self) -> str:
        """Name or file of the task's robot, or of both if there are two; empty for a task of another simulator."""
        options = self.task.options
        return str(next(iter(getattr(options, "robots", {}).values()), "") or getattr(options, "robot", ""))

    @property
    def title(self) -> str:
        """``<policy>-<algo>``, as in the default run directory and in ``tuned`` sections of task files."""
        return f"{self.policy.name}-{self.algo.name}"


def compose_run(overrides: Mapping[str, Any], derived: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """Compose the configuration of a new run from ``key=value`` overrides (precedence: embodied.core.config).

    derived: nested values that follow from the task, for ``embodied.session.defaults``.
    """
    words = expand(overrides)
    names = {group: registry.names() for group, registry in OF_OTHERS.items() if group in words}
    if words.get("randomization") == SIM2REAL:
        plain = {key: words[key] for key in words if not key.removeprefix("sim.").startswith(RANDOMIZED)}
        derived = {**derived, "sim": _sim2real_of(resolve(compose(CONFIG_DIR, plain, names, derived)))}
    return resolve(compose(CONFIG_DIR, words, names, derived))


def _sim2real_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the simulator that the file of the task's robot has in place of those of the preset.

    UserError for a term that is not in the preset. Of two robots, which are equal, the first counts.
    """
    robot = config.robot
    terms = robot_randomization(robot) if robot else {}
    known = read_preset(CONFIG_DIR, SIM2REAL)[RANDOMIZED]
    for name, term in terms.items():
        if name not in known and "field" not in (term or {}):
            raise unknown_name(f"term in randomization of robot {robot}", name, known)
    return {RANDOMIZED: terms}


def words_of_environment(words: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return those of the command line's words that build the environment again, with absolute paths of files.

    config: what they were composed to.
    """
    kept = {key: value for key, value in words.items() if key != "device"}
    for key in kept:
        section, *path = key.split(".")
        if section == "task" and path and path[0] in FILES:
            value = getattr(config.task.options, path[0])
            kept[key] = value[path[1]] if path[1:] else value
    return {**kept, "task": config.task.title}


def read_run(run_dir: Path) -> RunConfig:
    """Read the configuration of a run. UserError if the directory is not that of a run."""
    path, sections = run_dir / CONFIG_FILE, read_sections(run_dir)
    missing = [group for group in GROUPS if group not in sections]
    if missing:
        raise UserError(f"{path} is not the configuration of a run: it needs the sections {', '.join(GROUPS)}")
    sections["task"] = user_files.present(user_files.recorded(sections["task"], run_dir), run_dir)
    try:
        return resolve(sections)
    except UserError as error:
        raise UserError(f"{path} does not fit this version of the code, or its files: {error}") from error


def with_architecture(config: RunConfig, run_dir: Path) -> RunConfig:
    """Point ``policy.pretrained`` to the architecture and tokenizer in a run directory, if there are any.

    The policy then has random weights: those of one of the run's checkpoints must be loaded into it.
    """
    kept = run_dir / PRETRAINED
    options = config.policy.options
    if not hasattr(options, "pretrained") or not kept.is_dir():
        return config
    return replace(config, policy=replace(config.policy, options=replace(options, pretrained=str(kept / ARCHITECTURE))))


def read_acting(run_dir: Path, device: str, sim: str | None = None, randomization: str | None = None) -> RunConfig:
    """Read the configuration of a run to act with in this process; see ``with_device`` and ``with_environments``."""
    return with_device(with_environments(read_run(run_dir), sim, randomization), device)


def with_device(config: RunConfig, name: str) -> RunConfig:
    """Return a configuration to act with in this process, on another device than that of training."""
    return replace(config, runtime=RuntimeConfig(device=name, eval_noise=config.runtime.eval_noise))


def with_environments(config: RunConfig, sim: str | None, randomization: str | None) -> RunConfig:
    """Return a configuration with another simulator, or with a preset's settings in place of those of any preset.

    A simulator has its default options and the run's randomisation, of cameras too. None and its own change nothing.
    UserError for an unknown preset, and for a simulator that does not run the task or cannot randomise it.
    """
    sections = to_mapping(config)
    if sim not in (None, config.sim.name):
        kept = {key: sections["sim"].get(key) for key in ("randomization", "camera_randomization")}
        sections["sim"] = {"name": sim} | {key: value for key, value in kept.items() if value}
    if randomization is not None:
        preset = read_preset(CONFIG_DIR, randomization)
        settings: Any = OmegaConf.merge(preset, _sim2real_of(config) if randomization == SIM2REAL else {})
        for path in (CONFIG_DIR / "randomization").glob("*.yaml"):
            for key in read_preset(CONFIG_DIR, path.stem):
                sections["sim"].pop(key, None)
        sections["sim"] |= OmegaConf.to_container(settings)
    return config if sim is randomization is None else resolve(sections)


def resume_run(run_dir: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration with overrides; UserError for a key that cannot change when a run is resumed."""
    config = to_mapping(read_run(run_dir))
    changes = {}
    for key, value in expand(overrides).items():
        if key == PRESETS:
            raise UserError(f"{key} cannot change when a run is resumed: its options of sim stay")
        section, _, option = key.partition(".")
        before: Any = config
        for part in (f"{key}.name" if key in GROUPS else key).split("."):
            before = before.get(part) if isinstance(before, Mapping) else None
        name = option.partition(".")[0]
        unknown = section not in config or (section in GROUPS and name and name not in config[section])
        if value == before and not unknown:
            continue
        free = key in CHANGEABLE or (section in ("algo", "runtime") and option not in ("", "name", "group_size"))
        if not free and not unknown:  # ``resolve`` names an unknown key
            raise UserError(
                f"{key} cannot change when a run is resumed: it is {before!r}, got {value!r}. "
                f"Allowed: {', '.join(CHANGEABLE)} and options of algo and runtime"
            )
        changes[key] = value
    apply_values(config, changes)
    return resolve(config)


def resolve(mapping: Mapping[str, Any]) -> RunConfig:
    """Check every name and type of a composed configuration, and fill its sections with all defaults."""
    named = user_files.checked(mapping["task"])
    name, sampler = str(named["name"]), mapping.get("sampler", {"name": "uniform"})
    family, id = split_name(name)
    policy = read_section(mapping["policy"], POLICIES[mapping["policy"]["name"]].config, "policy")
    algo = read_section(mapping["algo"], ALGORITHMS[mapping["algo"]["name"]].config, "algo")
    episodes = read_section(sampler, SAMPLERS[sampler["name"]].config, "sampler")
    task = read_section(named, FAMILIES[family].build().task_config(id), "task")  # may import torch
    simulation = Section(*sim_options(name, mapping["sim"]))
    decisions = mapping["runtime"].get("decisions")
    if decisions is None:
        decisions = DECISIONS
        if getattr(algo.options, "group_size", 1) > 1:  # whole episodes are compared
            limit = FAMILIES[family].build().spec(id, task.options).max_episode_steps
            decisions = max(1, limit // policy.options.execute)
    runtime_class = RUNTIMES[mapping["runtime"]["name"]].config
    runtime = from_mapping(runtime_class, {**mapping["runtime"], "decisions": decisions}, "runtime")
    parts = dict(zip(GROUPS, (task, policy, algo, runtime, simulation, episodes), strict=True))
    known = [field.name for field in fields(RunConfig)]
    for key in mapping:
        if key in known:
            continue
        for group, part in parts.items():
            if key in getattr(part, "options", part).__dataclass_fields__:
                raise UserError(f"unknown key '{key}'. Did you mean '{group}.{key}'?")
        raise unknown_name("key", key, {*known, *SHORTHANDS, PRESETS, "resume"})
    return from_mapping(RunConfig, {**mapping, **parts})


def read_section(section: Mapping[str, Any], config: type[Any], path: str) -> Section:
    """Check a section against the dataclass of its options. path: prefix of the keys in messages."""
    options = {key: value for key, value in section.items() if key != "name" or "name" in config.__dataclass_fields__}
    return Section(section["name"], from_mapping(config, options, path))


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain values, the content of ``config.yaml``."""
    sections = {group: getattr(config, group) for group in GROUPS if group != "runtime"}
    return asdict(config) | {group: section.to_mapping() for group, section in sections.items()}


def to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))


def expand(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the short names of keys and of tasks by the full ones, and find a run that is part of this package."""
    expanded = {SHORTHANDS.get(key, key): value for key, value in overrides.items()}
    init = str(expanded.get("init", ""))
    if init.removeprefix("./").startswith(ASSETS) and not Path(init).exists():
        expanded["init"] = str(CONFIG_DIR.parent.parent / init)
    if "task" in expanded:
        task = str(expanded["task"]).removeprefix(f"{DEFAULT_FAMILY}/")  # tasks of ours have a short name
        expanded["task"] = user_files.absolute(task)
    return expanded
