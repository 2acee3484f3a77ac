"""What an adapter costs: its speed over that of the bare simulator, stepped through the simulator's own interface.

Both loops have the same actions, threads and number of envs, and speeds are control steps/s. docs/benchmarks.md has a
table of the ratios. ``_paused``: both loops pause after every step, which does not count.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
import torch

from embodied.benchmarks.measure import Report, built, paired, timed
from embodied.core.spec import Box
from embodied.envs.base.actions import random_actions
from embodied.envs.views.stepper import Stepper, open_task
from embodied.runtime import threads

PAUSE_S = 1e-4  # long enough for EnvPool's idle threads to fall asleep, so that its next step has to wake them


def measure(report: Report, short: bool) -> None:
    """Add a ratio and the speeds of each family that is installed."""
    cores, rounds, steps = threads.available_cores(), *((2, 4) if short else (25, 100))
    few, many, fewer = (4, 8, 2) if short else (64, 1024, 9)
    compare(report, "envpool", "envpool/HalfCheetah-v5", envpool_of, few, cores, rounds, steps)
    compare(report, "envpool_1024", "envpool/HalfCheetah-v5", envpool_of, many, cores, fewer, steps)
    compare(report, "gym", "gym/HalfCheetah-v5", gym_of, few, 1, rounds, steps)
    compare(report, "gym_light", "gym/CartPole-v1", gym_of, few, 1, rounds, steps)
    compare(report, "gym_light_1024", "gym/CartPole-v1", gym_of, many, 1, fewer, steps)
    compare(report, "maniskill", "maniskill/PickCube-v1", ManiSkill, 1 if short else 4, 1, min(rounds, 9), steps)


def compare(
    report: Report, name: str, task: str, make_bare: Callable[[str, int, int], Any], num_envs: int, num_threads: int,
    rounds: int, steps: int,
) -> None:  # fmt: skip
    """Add ``<name>_adapter_over_bare`` and both speeds, if both can be built. make_bare: given id, number, threads."""
    family, _, id = task.partition("/")
    sim = {"processes": 0} if family == "gym" else {}

    def both() -> tuple[Stepper, Any]:
        ours = open_task(task, num_envs, num_threads=num_threads, sim=sim, stagger=True)
        stack.enter_context(closing(ours))
        ours.reset()
        return ours, stack.enter_context(closing(make_bare(id, num_envs, num_threads)))

    with ExitStack() as stack:
        opened = built(name, both)
        if opened is None:
            return
        ours, bare = opened
        action_NTA = random_actions(ours.spec.action, num_envs, steps, seed=0)
        sides = {
            "adapted": (ours.env.step, list(action_NTA.transpose(0, 1).contiguous())),
            "bare": (bare.step, _bare_actions(ours.spec.action, action_NTA, bare.action_space.dtype)),
        }
        pauses = {"": 0.0, "_paused": PAUSE_S} if family == "envpool" else {"": 0.0}
        measures = {
            f"{side}{suffix}": partial(_speed, step, actions, num_envs, pause_s)
            for suffix, pause_s in pauses.items()
            for side, (step, actions) in sides.items()
        }
        settings = {"task": task, "num_envs": num_envs, "num_threads": num_threads, "control_steps": steps}
        results = report.measure(measures, rounds, "control steps/s", settings, f"{name}_{{}}")
    for suffix in pauses:
        ratio = paired(results[f"adapted{suffix}"], results[f"bare{suffix}"])
        report.ratio(f"{name}_adapter_over{suffix or '_bare'}", ratio)


def _speed(step: Callable[[Any], object], actions: Sequence[Any], num_envs: int, pause_s: float) -> float:
    """Return the control steps per second of ``num_envs`` envs; pauses do not count."""

    def loop() -> None:
        for action in actions:
            step(action)
            if pause_s:
                end = perf_counter() + pause_s
                while perf_counter() < end:
                    pass

    return num_envs * len(actions) / (timed(loop) - len(actions) * pause_s)


def _bare_actions(space: Any, action_NTA: torch.Tensor, dtype: np.dtype[Any]) -> list[Any]:
    """Return the same actions as a simulator takes them, one of all envs for each control step."""
    if not isinstance(space, Box):
        return list(action_NTA[..., 0].T.contiguous().numpy())
    scale, offset = (torch.tensor([getattr(term, name) for term in space.terms]) for name in ("scale", "offset"))
    return list((offset + scale * action_NTA).transpose(0, 1).contiguous().numpy().astype(dtype))


def envpool_of(id: str, num_envs: int, num_threads: int) -> Any:
    import envpool

    envs = envpool.make_gymnasium(id, num_envs=num_envs, num_threads=num_threads, seed=0)
    envs.reset()
    return envs


def gym_of(id: str, num_envs: int, num_threads: int) -> Any:
    envs = gymnasium.make_vec(id, num_envs=num_envs, vectorization_mode="sync")
    envs.reset(seed=0)
    return envs


class ManiSkill:
    """Single envs of ManiSkill that are stepped one after the other, as on a CPU."""

    def __init__(self, id: str, num_envs: int, num_threads: int) -> None:
        import mani_skill.envs  # noqa: F401 (registers them)

        options: dict[str, Any] = {"obs_mode": "state_dict", "sim_backend": "physx_cpu"}
        self.envs = [gymnasium.make(id, num_envs=1, **options) for _ in range(num_envs)]
        self.action_space = self.envs[0].action_space
        for env in self.envs:
            env.reset(seed=0)

    def step(self, actions: Any) -> None:
        for env, action in zip(self.envs, actions, strict=True):
            env.step(action)

    def close(self) -> None:
        for env in self.envs:
            env.close()
