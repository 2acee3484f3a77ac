"""What there is to know of an environment of gymnasium: its registration, its spaces, and what it reports."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import AutoresetMode

from embodied.core.errors import UserError, described
from embodied.core.spec import ActionSpace
from embodied.envs.adapters.gym_source import Only, Source, resets_by_mask
from embodied.envs.adapters.gym_spaces import ActionCodec, Leaf, action_space_of, leaves_of, mask_of

log = logging.getLogger(__name__)
SUCCESS_KEYS = ("is_success", "success")  # of infos
PROBE_STEPS = 5
DEFAULT_DT_S = 0.05


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose environments have ids that are known without it."""

    module: str
    """Module that registers them."""
    install: str
    """Name that pip installs it by."""
    prefixes: tuple[str, ...]
    """Beginnings of their ids."""


PACKAGES = (
    Package(
        "highway_env",
        "highway-env",
        (
            "highway-", "merge-", "roundabout-", "intersection-", "racetrack-", "parking-", "exit-", "u-turn-",
            "two-way-", "lane-keeping-",
        ),
    ),
    Package("gym_electric_motor", "gym-electric-motor", ("Cont-", "Finite-")),
    Package("ale_py", "ale-py", ("ALE/",)),
    Package("minigrid", "minigrid", ("MiniGrid-", "BabyAI-")),
    Package("gymnasium_robotics", "gymnasium-robotics", ("Fetch", "Hand", "AntMaze", "PointMaze", "Adroit", "Franka")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """Findings on an environment."""

    source: Source
    """How to build it."""
    leaves: tuple[Leaf, ...]
    """Parts of its observations."""
    action: ActionSpace
    """Its actions."""
    dt_s: float
    """Seconds between two actions: its ``dt``, or of ``render_fps``, or ``DEFAULT_DT_S``."""
    max_episode_steps: int | None
    """Time limit of its registration, control steps."""
    can_render: bool
    """Whether it gives pixels."""
    step_s: float
    """Seconds that a control step takes."""
    is_vector: bool
    """Whether its own vector environment is used, which steps all environments together."""


def known_ids() -> list[str]:
    """Return the ids that are registered, newest versions only, without ours."""
    newest: dict[tuple[str | None, str], Registration] = {}
    for registration in gymnasium.registry.values():
        key = registration.namespace, registration.name
        if registration.namespace == "embodied" or registration.entry_point is None:
            continue
        if key not in newest or (registration.version or 0) > (newest[key].version or 0):
            newest[key] = registration
    return sorted(registration.id for registration in newest.values())


def find(id: str) -> tuple[Registration, str | None]:
    """Return the registration of ``<id>`` or ``<module>:<id>``, and the module.

    UserError with the nearest names for an unknown id, with the command that installs it for a missing module.
    """
    module, _, name = id.rpartition(":")
    package = next((p for p in PACKAGES if module == p.module or (not module and name.startswith(p.prefixes))), None)
    if package is not None and name not in gymnasium.registry:
        if find_spec(package.module) is None:
            raise UserError(f"task gym/{id} needs a package that is not installed: pip install {package.install}")
        module = package.module
    if module:
        _import(module, id)
    registration = gymnasium.registry.get(name)
    if registration is None:
        near = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        where = f"after the import of '{module}'" if module else "in gymnasium; one of a package is gym/<module>:<id>"
        raise UserError(f"unknown environment '{name}' of the family gym.{hint} Not registered {where}")
    return registration, module or (package.module if package is not None else None)


def _import(module: str, id: str) -> None:
    """Import a module that registers environments. UserError if that fails."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise UserError(
                f"task gym/{id}: there is no module '{missing}': check its spelling, run in its folder, or install the "
                "package that contains it"
            ) from error
        raise UserError(f"task gym/{id}: importing '{module}' needs '{missing}': pip install {missing}") from error
    except Exception as error:  # a module of others may raise anything
        raise UserError(f"task gym/{id}: importing '{module}' failed: {described(error)}") from error


def probe(id: str, kwargs: dict[str, Any], success_key: str | None) -> Probe:
    """Build the environment once, make a few steps and return what was found.

    UserError for an unknown id, an environment that cannot be built, and spaces that cannot be served.
    """
    return _probe(id, json.dumps(kwargs, sort_keys=True), success_key)


@functools.cache
def _probe(id: str, kwargs: str, success_key: str | None) -> Probe:
    registration, module = find(id)
    name = f"gym/{id}"
    source = Source(name, registration, module, json.loads(kwargs))
    env, is_vector = _built(source)
    try:
        leaves, action = tuple(leaves_of(env.observation_space)), action_space_of(env.action_space)
        infos, seconds = zip(*_rollout(env, name), strict=True)
        keys = [key for key in SUCCESS_KEYS if any(key in info for info in infos)]
        success = success_key or (keys[0] if keys else None)
        if success_key and not any(success_key in info for info in infos):
            said = ", ".join(sorted(set().union(*infos))) or "nothing"
            unseen = "task %s: no info of its first %d steps has '%s'; they have: %s"
            log.warning(unseen, name, PROBE_STEPS, success_key, said)
        has_mask = mask_of(env, infos[0]) is not None
        modes = env.metadata.get("render_modes") or ()
        return Probe(
            Source(name, registration, module, json.loads(kwargs), success, has_mask),
            leaves,
            action,
            _dt_s(env),
            registration.max_episode_steps,
            "rgb_array" in modes,
            min(seconds[1:]),
            is_vector,
        )
    except UserError as error:
        named = str(error).startswith("task ")
        raise UserError(f"{error}" if named else f"task {name} cannot be served: {error}") from error
    finally:
        env.close()


def _built(source: Source) -> tuple[gymnasium.Env[Any, Any], bool]:
    """Build an environment; return it, and whether it is that of its own vector environment.

    That one is taken if it leaves resets to us and has the spaces of the single environment.
    """
    registration = source.registration
    single = None if registration.entry_point is None else source.build(render=False)
    if registration.vector_entry_point is None:
        assert single is not None  # gymnasium registers nothing without either
        return single, False
    vector = source.build_vector(1, render=False)
    only, by_mask = Only(vector), resets_by_mask(vector)
    if single is None:
        mode = vector.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            vector.close()
            raise UserError(
                f"task {source.name} is only a vector environment, and its metadata do not say how it resets: "
                f"autoreset_mode is {mode!r}, needed is one of gymnasium.vector.AutoresetMode"
            )
        if not by_mask:
            log.warning(
                "task %s is only a vector environment, and resets its environments itself. So each is stepped alone, "
                "which is slow; with AutoresetMode.DISABLED all would be stepped together",
                source.name,
            )
        return only, by_mask
    alike = (only.observation_space, only.action_space) == (single.observation_space, single.action_space)
    is_vector = by_mask and alike
    (single if is_vector else vector).close()
    return (only if is_vector else single), is_vector


def _rollout(env: gymnasium.Env[Any, Any], name: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield infos and durations (s) of a reset and of ``PROBE_STEPS`` random steps."""
    try:
        _, info = _unpacked(env.reset(seed=0), 2, name, "reset() must return an observation and an info")
        yield info, 0.0
        env.action_space.seed(0)
        for _ in range(PROBE_STEPS):
            action = _allowed_action(env, info)
            began = time.perf_counter()
            result = env.step(action)
            what = "step() must return observation, reward, terminated, truncated and info"
            _, _, terminated, truncated, info = _unpacked(result, 5, name, what)
            yield info, time.perf_counter() - began
            if terminated or truncated:
                _, info = env.reset()
    except UserError:
        raise
    except Exception as error:  # an environment of others may raise anything
        raise UserError(f"task {name} fails in its first steps: {described(error)}") from error


def _unpacked(result: Any, count: int, name: str, what: str) -> Any:
    """Return what a method gave, a tuple of ``count``. UserError otherwise."""
    if not isinstance(result, tuple) or len(result) != count:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise UserError(f"task {name}: {what}, got {got}")
    return result


def _allowed_action(env: gymnasium.Env[Any, Any], info: dict[str, Any]) -> Any:
    """Draw a random action; where a mask says what is allowed, the first choices that are."""
    mask = mask_of(env, info)
    if mask is None:
        return env.action_space.sample()
    codec = ActionCodec(env.action_space)
    begins = np.cumsum((0, *codec.counts[:-1]))
    allowed = [mask[b : b + n].argmax() for b, n in zip(begins, codec.counts, strict=True)]
    return codec.decode(np.array([allowed]))[0]


def _dt_s(env: gymnasium.Env[Any, Any]) -> float:
    """Return the seconds between two actions, as far as the environment says."""
    if env.has_wrapper_attr("dt"):
        dt = env.get_wrapper_attr("dt")
        if isinstance(dt, float) and dt > 0:
            return dt
    fps = env.metadata.get("render_fps")
    return 1.0 / fps if fps else DEFAULT_DT_S
