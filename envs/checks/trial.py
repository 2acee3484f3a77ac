"""One recorded run of an environment, which several checks examine.

this thread: builds and closes environments ─► a thread of the trial: resets, steps and renders them, as in a run
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler, EpisodeStats, Ints, PlanList
from embodied.core.errors import UserError, check_base
from embodied.core.execution import obs_to, timestep_to
from embodied.core.spec import Box, EnvSpec
from embodied.core.types import Obs, Timestep
from embodied.envs.base.actions import random_actions
from embodied.envs.episodes.registry import SamplerSetup, UniformConfig
from embodied.envs.episodes.sampler import UniformSampler

Make = Callable[[int], VecEnv]
"""Builds an env of N copies."""
CHUNK = 3  # actions per chunk
RECORDING_SHARE = 0.6  # of the time, for the checks before the check of leaks, which stops at LEAKS_SHARE
LEAKS_SHARE = 0.9
TOLERANCE = 1e-4  # a simulator may round differently for another number of envs
END_S = 1.0  # how long the thread that steps environments may take to end


class Excused(Exception):
    """A check has found no fault, because it does not apply or has stopped early; the message says why."""


class OutOfTime(Exception):
    """The checks have not ended in time."""


class Recording(UniformSampler):
    """Draw episodes of all instructions, stages and time limits; record the plans and the ended episodes.

    limit: greatest time limit that it draws, control steps.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, limit: int | None = None) -> None:
        super().__init__(spec, UniformConfig(), SamplerSetup(num_envs, seed, stages=True))
        self.limit = min(spec.max_episode_steps, limit or spec.max_episode_steps)
        self.given = EpisodePlans.empty(num_envs)
        self.heard: list[list[int]] = []

    def next(self, ended: EpisodeStats, steps_left_N: Tensor) -> EpisodePlans:
        self.heard.append(ended.env_id_M.tolist())
        return super().next(ended, steps_left_N)

    def _draw(self, ids: Ints, stagger: bool = False) -> EpisodePlans:
        plans = super()._draw(ids, stagger=True)
        plans.time_limit_n[:] = -(-plans.time_limit_n * self.limit // self.spec.max_episode_steps)
        self.given.put(ids, plans)
        return plans


@dataclass(frozen=True, slots=True)
class Moment:
    """One chunk of a rollout."""

    obs: Obs
    action: Tensor
    step: Timestep
    given: EpisodePlans
    """Plans of the episodes in progress at the start of the chunk."""
    heard: list[list[int]]
    """Envs that requested their next plans, a list per call."""


@dataclass
class Trial:
    """An environment on trial: builds copies of it, and records a run of N of them."""

    make: Make
    opened: ExitStack
    num_envs: int
    seed: int
    limit: int | None = None
    """See ``Recording``."""
    resets: int = 0
    """Number of resets of the check of leaks."""
    seconds: float = inf
    note: Callable[[str], None] = lambda _: None
    broken: bool = False
    """Whether the recorded run ended with an exception: no check can then say more."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        self.opened.callback(thread.join, END_S)  # torch aborts a process that ends while a thread frees a tensor
        self.opened.callback(self._calls.put, None)

    def require(self, kept: bool, rule: str) -> None:
        """Raise UserError with the rule unless the env keeps it."""
        if not kept:
            raise UserError(f"environment '{self.spec.task}' breaks the contract of a VecEnv: {rule}")

    def build(self, num_envs: int) -> VecEnv:
        """Build an env that is closed when the trial ends. UserError if it does not inherit ``VecEnv``."""
        env = self.make(num_envs)
        check_base(env, VecEnv, "environment")
        return self.opened.enter_context(closing(env))

    def apart(self, call: Callable[[], Any]) -> Any:
        """Call a function in the thread that steps environments. OutOfTime if the checks' time limit passes first.

        The thread does not keep the process from ending, whatever the call does.
        """
        future: Future[Any] = Future()
        self._calls.put((future, call))
        try:
            return future.result(min(max(0.0, self.left_s(1.0)), threading.TIMEOUT_MAX))
        except TimeoutError:
            if future.done():  # the call has raised it
                raise
            self.broken = True
            minutes = f"{self.seconds / 60:g} minutes (max_minutes=)"
            raise OutOfTime(f"not finished: {minutes} are over, within which all checks end") from None

    def _serve(self) -> None:
        while (order := self._calls.get()) is not None:
            future, call = order
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def left_s(self, share: float) -> float:
        """Return the seconds until this share of the time limit has passed."""
        return share * self.seconds - (time.monotonic() - self._began)

    def reset(self, env: VecEnv, sampler: EpisodeSampler) -> Obs:
        """Begin episodes; return the observations on the CPU."""
        return obs_to(self.apart(lambda: env.reset(sampler)), CPU)

    def step(self, env: VecEnv, action: Tensor) -> Timestep:
        """Execute chunks; return the result on the CPU."""
        return timestep_to(self.apart(lambda: env.step(action.to(env.device))), CPU)

    @cached_property
    def env(self) -> VecEnv:
        return self.build(self.num_envs)

    @cached_property
    def alone(self) -> VecEnv:
        return self.build(1)

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    @property
    def chunk(self) -> int:
        """Actions per chunk; 1 where masks hold for the next action alone."""
        return 1 if self.spec.action_mask else CHUNK

    @property
    def executed(self) -> int:
        """Control steps of a chunk."""
        return self.env.execute if self.env.max_delay else self.chunk

    @property
    def num_chunks(self) -> int:
        """Chunks in which every env ends at least two episodes."""
        return 4 * self.recording().limit // self.chunk + 4

    def recording(self) -> Recording:
        """Return a new sampler for N envs; each draws the same episodes."""
        return Recording(self.spec, self.num_envs, self.seed, self.limit)

    def actions(self, obs: Obs, t: int) -> Tensor:
        """Draw chunk ``t``, [N, E, A]: random actions, allowed ones where there is a mask."""
        if not self.spec.action_mask:
            return random_actions(self.spec.action, self.num_envs, self.chunk, t)
        assert not isinstance(self.spec.action, Box)
        generator = torch.Generator().manual_seed(t)
        masks = obs["action_mask"].float().split(self.spec.action.counts, -1)
        return torch.stack([torch.multinomial(mask, 1, generator=generator) for mask in masks], -1)

    @cached_property
    def rollout(self) -> list[Moment]:
        """The chunks of a run from a reset on, with random actions."""
        try:
            env = self.env
            if self.seconds < inf:
                self._shorten()
            sampler = self.recording()
            obs, moments = self.reset(env, sampler), []
            for t in range(self.num_chunks):
                obs = {key: value.clone() for key, value in obs.items()}  # the env must not overwrite it
                given, sampler.heard = sampler.given.rows(np.arange(self.num_envs)), []
                action = self.actions(obs, t)
                step = self.step(env, action)
                moments.append(Moment(obs, action, step, given, sampler.heard))
                obs = step.obs
            return moments
        except Exception:  # third-party code may raise anything
            self.broken = True
            raise

    def _shorten(self) -> None:
        """Lower the time limit of episodes so that the checks end in time, estimated from a few steps."""
        obs = self.reset(self.env, self.recording())
        for t in range(2):  # the first may compile
            began = time.monotonic()
            obs = self.step(self.env, self.actions(obs, t)).obs
        step_s = (time.monotonic() - began) / self.executed
        limit = self.recording().limit
        # about 8 control steps of all envs for each of the limit: 4 of the recorded run, 4 of its episodes alone
        affordable = int((self.left_s(RECORDING_SHARE) / step_s - 20) / 8)
        if affordable < limit:
            self.limit = max(2, affordable)
            slow = f"a control step of {self.num_envs} environments takes {step_s:.2g} s"
            cut = f"episodes are cut to {self.limit} control steps instead of {limit}"
            self.note(f"{slow}: {cut}, so that the checks end within {self.seconds / 60:g} minutes")

    def repeats(self) -> Iterator[tuple[int, list[Moment], Obs]]:
        """Begin the episode of each env that must repeat in ``alone``; yield the env, its chunks and first observation.

        It is the second episode, so that traces of the first would show; or the first, if later ones do not repeat.
        """
        for k in range(self.num_envs):
            ends = [t for t, moment in enumerate(self.rollout) if k in moment.step.final_ids.tolist()]
            steps = len(self.rollout) * self.executed
            self.require(len(ends) >= 2, f"no two episodes of an env ended in {steps} control steps")
            begin, end = (ends[0] + 1, ends[1]) if self.spec.repeats == "all" else (0, ends[0])
            plan = self.rollout[end].given.rows(np.array([k]))
            yield k, self.rollout[begin : end + 1], self.reset(self.alone, PlanList(plan, 1))


def alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> bool:
    """Return whether two observations are equal up to rounding, which is one level for images."""
    if a.keys() != b.keys():
        return False
    for key, value in a.items():
        allowed = 1.0 if tolerance and value.dtype == torch.uint8 else tolerance
        if not bool(((value.double() - b[key].double()).abs() <= allowed).all()):
            return False
    return True


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    """Describe where two observations of one env differ most, for messages."""
    if a.keys() != b.keys():
        return f"one has {sorted(a)}, the other {sorted(b)}"
    gaps = {key: (value.double() - b[key].double()).abs().flatten() for key, value in a.items() if value.numel()}
    key = max(gaps, key=lambda key: float(gaps[key].max()))
    at = int(gaps[key].argmax())
    one, other = (float(part[key].flatten()[at]) for part in (a, b))
    return f"obs['{key}'][{at}] is {one:.4g} the first time and {other:.4g} the second"


def memory_bytes() -> int:
    """Return the resident memory of this process and all its descendants, bytes (Linux)."""
    total = 0
    for process in (os.getpid(), *_descendants(os.getpid())):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            total += int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def usage() -> dict[str, int]:
    """Return the numbers of threads and open files of this process, and of the processes that descend from it."""
    processes = len(list(_descendants(os.getpid())))
    return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")), "processes": processes}


def _descendants(process: int) -> Iterator[int]:
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)
