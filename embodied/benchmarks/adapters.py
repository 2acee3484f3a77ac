"""What an adapter costs: its speed over that of the bare simulator, stepped through the simulator's own interface.

    envpool_adapter_over_bare      task=envpool/HalfCheetah-v5 / EnvPool's own ``step``, 64 envs each
    envpool_adapter_over_paused    the same, if both loops pause for 0.1 ms after every step; the pauses do not count
    gym_adapter_over_bare          task=gym/HalfCheetah-v5 / gymnasium's SyncVectorEnv, 64 envs each, one process
    gym_light_adapter_over_bare    the same for task=gym/CartPole-v1, 64 envs, whose step takes 8 microseconds
    maniskill_adapter_over_bare    task=maniskill/PickCube-v1 in one process / ManiSkill's own, 4 envs each, in turn
    <name>_1024_...                the same with 1,024 envs each: most of what an adapter costs is a cost per step

Both loops have the same actions, threads and number of envs, and speeds are control steps/s. Ours also checks actions,
counts episodes, resets in the step in which an episode ends with the seed of the next one, and keeps the last
observations. Our own pool over its bare engine is ``pool_over_engine_1024`` (sim.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium
import torch

from embodied.benchmarks.measure import Report, built, paired, timed
from embodied.core.env import VecEnv
from embodied.core.spec import Box
from embodied.envs import FAMILIES
from embodied.envs.base.actions import random_actions
from embodied.envs.episodes.sampler import SamplerSetup, UniformConfig, UniformSampler
from embodied.runtime import threads

PAUSE_S = 1e-4  # long enough for EnvPool's idle threads to fall asleep, so that its next step has to wake them


def measure(report: Report, short: bool) -> None:
    """Add a ratio and the speeds of each family that is installed."""
    cores, rounds, steps = threads.available_cores(), *((2, 4) if short else (25, 100))
    few, many, fewer = (4, 8, 2) if short else (64, 1024, 9)
    compare(report, "envpool", "HalfCheetah-v5", _envpool, few, cores, rounds, steps)
    compare(report, "envpool", "HalfCheetah-v5", _envpool, many, cores, fewer, steps, "envpool_1024")
    compare(report, "gym", "HalfCheetah-v5", _gym, few, 1, rounds, steps)
    compare(report, "gym", "CartPole-v1", _gym, few, 1, rounds, steps, "gym_light")
    compare(report, "gym", "CartPole-v1", _gym, many, 1, fewer, steps, "gym_light_1024")
    compare(report, "maniskill", "PickCube-v1", _maniskill, 1 if short else 4, 1, min(rounds, 9), steps)


def compare(
    report: Report,
    family: str,
    id: str,
    make_bare: Callable[..., Any],
    num_envs: int,
    num_threads: int,
    rounds: int,
    steps: int,
    name: str | None = None,
) -> None:
    """Add ``<name>_adapter_over_bare`` and both speeds, if both can be built here.

    make_bare: builds the bare envs, given id, number, threads.
    """
    name = name or family
    pauses = {"": 0.0, "_paused": PAUSE_S} if family == "envpool" else {"": 0.0}
    both = built(name, partial(_both, family, id, make_bare, num_envs, num_threads))
    if both is None:
        return
    env, bare = both
    with closing(env), closing(bare):
        action_NTA = random_actions(env.spec.action, num_envs, steps, seed=0)
        ours = list(action_NTA.transpose(0, 1).contiguous())
        theirs = _bare_actions(env.spec.action, action_NTA, bare.action_space)
        loops = {
            f"{side}{suffix}": partial(_speed, stepped, actions, num_envs, pause_s)
            for suffix, pause_s in pauses.items()
            for side, stepped, actions in (("adapted", env, ours), ("bare", bare, theirs))
        }
        settings = {"task": env.spec.task, "num_envs": num_envs, "num_threads": num_threads, "control_steps": steps}
        results = report.measure(loops, rounds, "control steps/s", settings, f"{name}_{{}}")
    for suffix in pauses:
        ratio = paired(results[f"adapted{suffix}"], results[f"bare{suffix}"])
        report.ratio(f"{name}_adapter_over{suffix or '_bare'}", ratio)


def _both(family: str, id: str, make_bare: Callable[..., Any], num_envs: int, num_threads: int) -> tuple[VecEnv, Any]:
    """Return the envs of a family and the bare ones, after their first resets."""
    ours = FAMILIES[family].build()
    sim = FAMILIES[family].config(**({"processes": 0} if family == "gym" else {}))
    env = ours.make(id, ours.task_config(id)(), num_envs=num_envs, num_threads=num_threads, sim=sim)
    try:
        env.reset(UniformSampler(env.spec, UniformConfig(), SamplerSetup(num_envs, stagger=True)))
        bare = make_bare(id, num_envs, num_threads)
        bare.reset(seed=0)
    except BaseException:
        env.close()
        raise
    return env, bare


def _speed(env: Any, actions: Sequence[Any], num_envs: int, pause_s: float) -> float:
    """Return the control steps per second of ``num_envs`` envs; pauses do not count."""
    seconds = timed(lambda: _step_all(env, actions, pause_s)) - len(actions) * pause_s
    return num_envs * len(actions) / seconds


def _step_all(env: Any, actions: Sequence[Any], pause_s: float) -> None:
    for action in actions:
        env.step(action)
        if pause_s:
            end = perf_counter() + pause_s
            while perf_counter() < end:
                pass


def _bare_actions(space: Any, action_NTA: torch.Tensor, theirs: Any) -> list[Any]:
    """Return the same actions as a simulator takes them, one of all envs for each control step."""
    if not isinstance(space, Box):
        return list(action_NTA[..., 0].T.contiguous().numpy())
    scale, offset = (torch.tensor([getattr(term, name) for term in space.terms]) for name in ("scale", "offset"))
    return list((offset + scale * action_NTA).transpose(0, 1).contiguous().numpy().astype(theirs.dtype))


class _Envpool:
    """EnvPool without the ``reset(seed=)`` that it warns of."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.step, self.close, self.action_space = pool, pool.step, pool.close, pool.action_space

    def reset(self, seed: int) -> None:
        self.pool.reset()


def _envpool(id: str, num_envs: int, num_threads: int) -> Any:
    import envpool

    return _Envpool(envpool.make_gymnasium(id, num_envs=num_envs, num_threads=num_threads, seed=0))


def _gym(id: str, num_envs: int, num_threads: int) -> Any:
    return gymnasium.make_vec(id, num_envs=num_envs, vectorization_mode="sync")


def _maniskill(id: str, num_envs: int, num_threads: int) -> Any:
    import mani_skill.envs  # noqa: F401 (registers them)

    options: dict[str, Any] = {"obs_mode": "state_dict", "sim_backend": "physx_cpu"}
    return _InTurn([gymnasium.make(id, num_envs=1, **options) for _ in range(num_envs)])


class _InTurn:
    """Single envs that are stepped one after the other, as ManiSkill's are on a CPU."""

    def __init__(self, envs: list[Any]) -> None:
        self.envs, self.action_space = envs, envs[0].action_space

    def reset(self, seed: int) -> None:
        for env in self.envs:
            env.reset(seed=seed)

    def step(self, actions: Any) -> None:
        for env, action in zip(self.envs, actions, strict=True):
            env.step(action)

    def close(self) -> None:
        for env in self.envs:
            env.close()
