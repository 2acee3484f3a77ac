"""What there is to know of an environment of gymnasium: its registration, its spaces, and what it reports."""

import functools
import json
import logging
import math
import numbers
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import AutoresetMode, VectorWrapper
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from embodied.core.errors import UserError, describe_error, nearest
from embodied.core.spec import ActionSpace, Box
from embodied.envs.adapters.gym.results import WrongResult, advice, mask_of, reset_of, staying, step_of
from embodied.envs.adapters.gym.source import SingleEnvView, Source, class_of, close
from embodied.envs.adapters.gym.spaces import ActionCodec, Leaf, action_space_of, check_names, leaves_of

log = logging.getLogger(__name__)
SUCCESS_KEYS = ("is_success", "success")  # of infos
PROBE_STEPS = 5
DEFAULT_DT_S = 0.05  # of an environment that states no rate
DEFAULT_STEPS = 1000  # of an environment that states no time limit
PACKAGES = {
    "highway_env": (
        "highway-", "merge-", "roundabout-", "intersection-", "racetrack-", "parking-", "exit-", "u-turn-", "two-way-",
        "lane-keeping-",
    ),
    "gym_electric_motor": ("Cont-", "Finite-"),
    "ale_py": ("ALE/",),
    "minigrid": ("MiniGrid-", "BabyAI-"),
    "gymnasium_robotics": ("Fetch", "Hand", "AntMaze", "PointMaze", "Adroit", "Franka"),
}  # fmt: skip
"""Modules that register environments whose ids are known without them: the beginnings of the ids."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Findings on an environment."""

    source: Source
    stated_steps: int | None
    """Its time limit: of the option, its registration or its own ``TimeLimit``; None: it states none."""
    leaves: tuple[Leaf, ...]
    action: ActionSpace
    dt_s: float | None
    """Seconds between two actions: its ``dt``, or of ``render_fps``; None if it states neither."""
    can_render: bool
    step_s: float
    is_vector: bool
    """Whether its own vector environment is used, which steps all environments together."""


def known_ids() -> list[str]:
    """Return the ids that are registered, newest versions only, without ours."""
    newest: dict[tuple[str | None, str], Registration] = {}
    for registration in sorted(gymnasium.registry.values(), key=lambda registration: registration.version or 0):
        if registration.namespace != "embodied" and registration.entry_point is not None:
            newest[registration.namespace, registration.name] = registration
    return sorted(registration.id for registration in newest.values())


def find(id: str) -> tuple[Registration, str | None]:
    """Return the registration of ``<id>`` or ``<module>:<id>``, and the module.

    UserError with the nearest name for an unknown id, with the command that installs it for a missing module.
    """
    module, _, name = id.rpartition(":")
    if module.endswith(".py"):
        named = module.removesuffix(".py").replace("/", ".")
        raise UserError(f"task gym/{id}: give the module instead of its file, gym/{named}:{name}")
    package = next((p for p, ids in PACKAGES.items() if module == p or (not module and name.startswith(ids))), "")
    if package and name not in gymnasium.registry and find_spec(package) is None:
        install = f"pip install {package.replace('_', '-')}"
        raise UserError(f"task gym/{id} needs a package that is not installed: {install}")
    module = module or package
    try:
        if module:
            import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        package, _, rest = missing.partition(".")
        if f"{module}.".startswith(f"{missing}."):
            cure = "check its spelling, run in its folder, or install the package that contains it"
            raise UserError(f"task gym/{id}: there is no module '{missing}': {cure}") from error
        cure = f"the '{package}' that is installed does not have it: install another version"
        needs = f"importing '{module}' needs '{missing}': {cure if rest else f'pip install {missing}'}"
        raise UserError(f"task gym/{id}: {needs}") from error
    except Exception as error:  # a module of others may raise anything
        raise UserError(f"task gym/{id}: importing '{module}' failed: {describe_error(error)}") from error
    registration = gymnasium.registry.get(name)
    if registration is None:
        near = nearest(name, gymnasium.registry)
        hint = f" Did you mean '{near}'?" if near else ""
        where = f"after the import of '{module}'" if module else "in gymnasium; one of a package is gym/<module>:<id>"
        raise UserError(f"unknown environment '{name}' of the family gym.{hint} Not registered {where}")
    return registration, module or None


def probe(id: str, kwargs: dict[str, Any], success_key: str | None, max_episode_steps: int | None = None) -> Probe:
    """Build the environment once, make a few steps and return what was found. UserError if it cannot be served."""
    return _probe(id, json.dumps(kwargs, sort_keys=True), success_key, max_episode_steps)


@functools.cache
def _probe(id: str, kwargs: str, success_key: str | None, max_episode_steps: int | None) -> Probe:
    registration, module = find(id)
    name = f"gym/{id}"
    limit = max_episode_steps or registration.max_episode_steps or DEFAULT_STEPS
    source = Source(name, registration, module, json.loads(kwargs), limit)
    env, is_vector = _built(source)
    try:
        wrappers = list(_wrappers(env))
        for kept in {"NormalizeObservation", "NormalizeReward"} & {type(each).__name__ for each in wrappers}:
            copies = "keeps statistics of its own in each copy, so evaluations would see other numbers than training"
            raise UserError(f"its wrapper {kept} {copies}: leave it out, the policy standardises what it gets")
        stated = max_episode_steps or registration.max_episode_steps
        if stated is None:
            limits = [each.spec.max_episode_steps for each in wrappers if isinstance(each, TimeLimit) and each.spec]
            stated = min((limit for limit in limits if limit), default=None)
            source = replace(source, max_episode_steps=stated or DEFAULT_STEPS)
        leaves, action = tuple(leaves_of(env.observation_space)), action_space_of(env.action_space)
        check_names(leaves)
        infos, step_s, has_mask = _first_steps(env, leaves, isinstance(action, Box))
        reported = set().union(*infos)
        success = success_key or next((key for key in SUCCESS_KEYS if key in reported), None)
        if success_key and success_key not in reported:
            unseen = "task %s: no info of its first %d steps has '%s'; they have: %s"
            log.warning(unseen, name, PROBE_STEPS, success_key, ", ".join(sorted(reported)) or "nothing")
        source = replace(source, success=success, has_mask=has_mask)
        can_render = "rgb_array" in (env.metadata.get("render_modes") or ()) and source.takes_render_mode
        return Probe(source, stated, leaves, action, _dt_s(env), can_render, step_s, is_vector)
    except WrongResult as error:
        raise UserError(f"task {name} cannot be served: its class {class_of(env)} {error}") from error
    except UserError as error:
        raise UserError(f"task {name} cannot be served: {error}") from error
    except (Exception, SystemExit) as error:  # an environment of others may raise anything
        raise UserError(f"task {name} fails in its first steps: {describe_error(error)}{advice(error)}") from error
    finally:
        close(env)


def _built(source: Source) -> tuple[gymnasium.Env[Any, Any], bool]:
    """Build an environment: its own vector environment if that fits and leaves resets to us (True), or a single one."""
    registration = source.registration
    single = None if registration.entry_point is None else source.build(render=False)
    if single is not None and registration.vector_entry_point is None:
        return single, False
    try:
        view = SingleEnvView(source.build_vector(1, render=False))
    except UserError as error:
        if single is None:
            raise
        log.info("%s; single environments are used", error)
        return single, False
    by_mask = bool(view.mode == AutoresetMode.DISABLED)
    if single is not None:
        alike = (view.observation_space, view.action_space) == (single.observation_space, single.action_space)
        used, unused = (view, single) if by_mask and alike else (single, view)
        unused.close()
        return used, used is view
    if not isinstance(view.mode, AutoresetMode):
        view.close()
        why = f"its metadata do not say how it resets: autoreset_mode is {view.mode!r}"
        needed = "one of gymnasium.vector.AutoresetMode"
        raise UserError(f"task {source.name} is only a vector environment, and {why}, needed is {needed}")
    if not by_mask:
        alone = "So each is stepped alone, which is slow; with AutoresetMode.DISABLED all would be stepped together"
        log.warning(f"task {source.name} is only a vector environment, and resets its environments itself. {alone}")
    return view, by_mask


def _wrappers(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """Yield the wrappers of an environment, or of the vector environment that it shows, from outside."""
    inner: Any = env.vector if isinstance(env, SingleEnvView) else env
    while isinstance(inner, (gymnasium.Wrapper, VectorWrapper)):
        yield inner
        inner = inner.env


@staying()
def _first_steps(
    env: gymnasium.Env[Any, Any], leaves: Sequence[Leaf], continuous: bool
) -> tuple[list[Mapping[str, Any]], float, bool]:
    """Make some random steps; return infos, the duration of the fastest (s), and whether a mask forbids choices."""
    observation, info = reset_of(env.reset(seed=0))
    infos, step_s, has_mask = [info], math.inf, False
    env.action_space.seed(0)
    before: dict[str, NDArray[Any]] = {}
    blurred: set[str] = set()  # parts whose changes float32 loses
    for _ in range(PROBE_STEPS):
        for leaf in leaves:
            value = leaf.value(observation).copy()
            old = before.get(leaf.name, value)
            if ((value != old) & (np.float32(value) == np.float32(old))).any():
                blurred.add(leaf.name)
            before[leaf.name] = value
        action, mask = env.action_space.sample(), None if continuous else mask_of(env, info)
        if mask is not None:  # the first choices that are allowed
            has_mask = True
            codec = ActionCodec(env.action_space)
            allowed = [part.argmax() for part in np.split(mask, np.cumsum(codec.counts)[:-1])]
            action = codec.decode(np.array([allowed]))[0]
        began = time.perf_counter()
        result = env.step(action)
        step_s = min(step_s, time.perf_counter() - began)
        observation, _, terminated, truncated, info = step_of(result)
        infos.append(info)
        if terminated or truncated:
            observation, info = reset_of(env.reset())
    for name in sorted(blurred):
        log.warning(
            f"observation '{name}' changes by less than float32 can tell from {before[name].max():g}: center it"
        )
    return infos, step_s, has_mask


def _dt_s(env: gymnasium.Env[Any, Any]) -> float | None:
    """Return the seconds between two actions; None if the environment does not say."""
    dt_s: Any = env.get_wrapper_attr("dt") if env.has_wrapper_attr("dt") else None
    for value, is_rate in ((dt_s, False), (env.metadata.get("render_fps"), True)):
        if isinstance(value, numbers.Real) and 0 < float(value) < math.inf:
            return 1.0 / float(value) if is_rate else float(value)
    return None
