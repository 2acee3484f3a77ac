"""Env worker: groups of environments, each of which fills one fragment after the other.

    start(ticket): obs, noise ──► actor ──► advance(reply): env.step, record ──► next request ── … ──► Fragment

After T decisions the request is for values alone; its reply completes the fragment with V of the last observation. The
first action of the next fragment is drawn after the ledger has admitted that fragment, so with max_staleness=0 every
decision is exactly on-policy. The last observations of episodes that ended are in the next request. Each group draws
its noise with a key of its own when it makes a request, so results do not depend on how requests are merged.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.contract import check_obs, check_timestep
from embodied.core.device import CPU, copied_to_cpu
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodeSampler
from embodied.core.errors import UserError
from embodied.core.execution import clip_chunk, obs_to, timestep_to
from embodied.core.types import Fragment, Obs, Timestep
from embodied.runtime.collecting.actor_server import ActReply, ActRequest
from embodied.runtime.collecting.recorder import At, Recorder
from embodied.runtime.ledger import Ticket
from embodied.runtime.watch import Track

HOLDING = 4  # every fourth env of a group holds its noise, until an episode of it terminates
HELD_DRAWS = 128  # of held noise, after which no env holds it


Noise = tuple[Tensor, Tensor]
"""Noise of a decision, [N, ...]: of envs that draw it anew and of those that hold theirs."""


@dataclass(eq=False)
class GroupRollout:
    """Progress of one group: its env, sampler, noise, latest observations and the fragment in the making."""

    env: VecEnv
    sampler: EpisodeSampler  # of the episodes
    key: tuple[int, int, int]  # worker, group and incarnation
    decisions: int  # T of a fragment
    execute: int  # E of a chunk
    noise_shape: tuple[int, ...]  # of the policy
    seed: int  # of the run
    worker_track: Track
    device: torch.device = CPU  # of recorded observations and actions
    noise_hold: int = 1  # decisions for which the holding envs keep their noise
    request: ActRequest | None = None  # the latest of the fragment in the making; None between two fragments

    def __post_init__(self) -> None:
        self.track = Track(f"group {self.key[1]}", "wait_ticket")
        self._noise_key = np.random.SeedSequence((self.seed, *self.key)).generate_state(2, np.uint64)
        self._drawn = 0  # decisions whose noise was drawn
        self._holding_N = torch.arange(1, self.env.num_envs + 1) % HOLDING == 0  # envs that hold their noise
        # beside a simulator on a GPU the CPU is idle: it draws the next noise during a step
        self._drawer = ThreadPoolExecutor(1) if self.env.device.type == "cuda" else None
        self._ahead: Future[Noise] | None = None  # of decision ``_drawn``
        self._checked = False  # whether a step in which episodes ended has passed ``check_timestep``
        self._env_N = torch.arange(self.env.num_envs)
        self._ends: list[tuple[Tensor, Obs]] = []  # decision and env of ends [M, 2], last observations; see ``_ended``

    @cached_property
    def obs(self) -> Obs:
        """Latest observation of each env; its first reading resets the envs."""
        return self._reset()

    def start(self, ticket: Ticket) -> ActRequest:
        """Begin a fragment; return the request of its first decision."""
        self.ticket, self._recorder, self._t = ticket, Recorder(self.decisions, self.env.num_envs), 0
        return self._ask()

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        """Execute the actor's reply; return the next request, or the complete fragment."""
        request, recorder = self.request, self._recorder
        assert request is not None
        if request.final_obs is not None:
            assert reply.final_value_M is not None
            recorder.end(self._ended_M2, reply.final_value_M, reply.final_obs or request.final_obs)
        obs = request.obs if reply.obs is None else reply.obs
        if reply.sample is None:
            assert reply.value_N is not None
            self.request = None
            return recorder.fragment(obs, reply.value_N, self.ticket)
        action_NEA = clip_chunk(self.env, reply.sample.action_NHA, self.execute)
        recorder.decide(self._at, obs, reply.sample, action_NEA[:, : self.execute].to(self.device))
        self._step(action_NEA.to(self.env.device))
        return self._ask()

    def _ask(self) -> ActRequest:
        """Request the next decision, or after the last decision values alone; both with the last ends of episodes."""
        obs, noise = self._inputs()
        final_obs = None
        if self._ends:
            indices, parts = zip(*self._ends, strict=True)
            self._ended_M2 = torch.cat(indices)
            final_obs = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            self._ends = []
        self.request = ActRequest(self.ticket.worker, self.ticket.group, obs, noise, final_obs)
        return self.request

    # ------------------------------------------------------------- what differs if envs are not stepped together
    @property
    def _at(self) -> At:
        return self._t

    def _inputs(self) -> tuple[Obs, Tensor | None]:
        """Return observations and noise of the next decision; no noise if all have been made."""
        return self.obs, self.draw_noise() if self._t < self.decisions else None

    def _step(self, action_NEA: Tensor) -> None:
        """Execute the decisions of a reply and record them."""
        self._enter("step")
        step = timestep_to(self.env.step(action_NEA), self.device)
        self._record(step, self._t, torch.full_like(self._env_N, self._t), self._env_N)
        self.obs = step.obs
        self._t += 1

    def _record(self, step: Timestep, at: At, decision_N: Tensor, env_N: Tensor) -> None:
        """Keep the outcome of decisions ``at``, which are ``decision_N`` of envs ``env_N``."""
        self._enter("record")
        ids = step.final_ids
        if not self._checked:
            check_timestep(self.env, step, self.execute, env_N)
            self._checked = len(ids) > 0
        self._recorder.result(at, step)
        if len(ids):
            if self.noise_hold > 1:  # otherwise a GPU need not be waited for
                self._holding_N[env_N[step.terminated_N.to(CPU)]] = False
            self._ends.append((torch.stack([decision_N[ids], env_N[ids]], dim=-1), step.final_obs))

    def _enter(self, activity: str) -> None:
        self.track.enter(activity)
        self.worker_track.enter(activity)

    def draw_noise(self) -> Tensor:
        """Draw the noise of the group's next decision, standard normals [N, *noise_shape].

        It is a function of the group's key and of the number of the decision. Generator: Philox (Salmon et al. 2011).
        Its key has 128 bits. A generator of torch uses 32 bits of its seed on the CPU, so some groups would be alike.
        """
        return self._chosen(self._next_noise(), self._env_N)

    def _next_noise(self) -> Noise:
        noise = self._noise(self._drawn) if self._ahead is None else self._ahead.result()
        self._drawn += 1
        if self._drawer is not None:
            self._ahead = self._drawer.submit(self._noise, self._drawn)
        return noise

    def _noise(self, number: int) -> Noise:
        """Return the noise of a decision of the group, before it is known which envs hold theirs."""
        fresh_N = self._normals(number << 128)
        if self.noise_hold == 1 or number >= HELD_DRAWS * self.noise_hold:
            return fresh_N, fresh_N
        # 64 bits of a counter are enough for the numbers of a draw
        return fresh_N, self._normals((number // self.noise_hold << 128) + (1 << 64))

    def _chosen(self, noise: Noise, env_N: Tensor) -> Tensor:
        """Return the noise of envs ``env_N`` with that of those that hold theirs now."""
        fresh_N, held_N = noise
        holding_N = self._holding_N[env_N].view(-1, *[1] * len(self.noise_shape))
        return fresh_N if fresh_N is held_N else torch.where(holding_N, held_N, fresh_N)

    def _normals(self, counter: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=self._noise_key, counter=counter))
        shape = (self.env.num_envs, *self.noise_shape)
        return torch.from_numpy(generator.standard_normal(shape, np.float32))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of sampler and noise, and of an env that resumes exactly; between fragments."""
        assert self.request is None, "a group can be saved between its fragments only"
        obs = self.obs  # resets an env that has not begun
        state = {"num_envs": self.env.num_envs, "sampler": self.sampler.state_dict(), "noise_drawn": self._drawn}
        key = torch.from_numpy(self._noise_key.view(np.int64).copy())
        state |= {"noise_key": key, "noise_holding": self._holding_N.clone()}
        if self.env.resumes_exactly:
            state["env"] = copied_to_cpu(self.env.state_dict())
            state["obs"] = copied_to_cpu(obs)
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from ``state_dict``; an env that cannot be resumed exactly starts new episodes."""
        if state is None:
            raise UserError("the checkpoint lacks env workers that were still to join: resume it with runtime=ray")
        if state["num_envs"] != self.env.num_envs:
            differ = f"{state['num_envs']} envs in a group, this run {self.env.num_envs}"
            raise UserError(f"the checkpoint has {differ}: keep num_envs")
        self.sampler.load_state_dict(state["sampler"])
        self._drawn, self._ahead = state["noise_drawn"], None
        if "noise_key" in state:  # a replaced worker's differs; earlier checkpoints have neither this nor the next
            self._noise_key = state["noise_key"].numpy().view(np.uint64).copy()
        self._holding_N = state.get("noise_holding", self._holding_N).clone()
        if self.env.resumes_exactly:
            self.env.load_state_dict(state["env"], self.sampler)
            self.obs = {key: tensor.to(self.device, copy=True) for key, tensor in state["obs"].items()}
        else:
            self.obs = self._reset()

    def _reset(self) -> Obs:
        obs = obs_to(self.env.reset(self.sampler), self.device)
        check_obs(self.env, obs, self.env.num_envs, "reset()")
        return obs


class RowRollout(GroupRollout):
    """Progress of a group whose envs need not be stepped together (``VecEnv.batch_size``).

        request for rows that are done ──► sample ──► send ──► receive: rows that are done ──► request for them
                                                      (the other rows are in the simulator all the time)

    A row that has its T decisions waits for the others; the last request is for the values of all rows. The noise of a
    decision is the one that a ``GroupRollout`` would draw, so the same weights draw the same decisions, up to rounding.
    """

    def start(self, ticket: Ticket) -> ActRequest:
        fresh_TN, held_TN = zip(*(self._next_noise() for _ in range(self.decisions)), strict=True)
        self._noise_TN = torch.stack(fresh_TN), torch.stack(held_TN)
        self._t_N = torch.zeros(self.env.num_envs, dtype=torch.int64)  # decisions that each row has made
        self._asked = self._env_N  # rows of the latest request; none if it is for the values of all
        self._under_way = 0  # rows in the simulator
        return super().start(ticket)

    @property
    def _at(self) -> At:
        return self._t_N[self._asked], self._asked

    def _inputs(self) -> tuple[Obs, Tensor | None]:
        if not len(self._asked):
            return self.obs, None
        fresh_TN, held_TN = self._noise_TN
        noise = self._chosen((fresh_TN[self._at], held_TN[self._at]), self._asked)
        return {key: value[self._asked] for key, value in self.obs.items()}, noise

    def _step(self, action_NEA: Tensor) -> None:
        """Step the rows that were asked for, and wait until rows need a decision or all have made theirs."""
        self._enter("step")
        self.env.send(action_NEA, self._asked)
        self._under_way += len(self._asked)
        self._asked = self._asked[:0]
        while self._under_way and not len(self._asked):
            self._enter("step")
            rows, step = self.env.receive()
            step = timestep_to(step, CPU)
            decision_n = self._t_N[rows]
            self._record(step, (decision_n, rows), decision_n, rows)
            for key, value in step.obs.items():
                self.obs[key][rows] = value
            self._under_way -= len(rows)
            self._t_N[rows] += 1
            self._asked = rows[self._t_N[rows] < self.decisions]


class EnvWorker:
    """Env groups of one worker; one thread at a time may call it. A runtime carries its requests and replies.

    groups: envs with the samplers of their episodes. decisions: T of a fragment. execute: E of a chunk. noise_shape:
    that of the policy. seed: that of the run. incarnation: how often the worker was replaced; each draws other noise.
    device: of the observations and actions of its fragments. noise_hold: see ``RuntimeConfig``.
    """

    def __init__(
        self,
        groups: Sequence[tuple[VecEnv, EpisodeSampler]],
        worker_id: int,
        decisions: int,
        execute: int,
        noise_shape: tuple[int, ...],
        seed: int,
        incarnation: int = 0,
        device: torch.device = CPU,
        noise_hold: int = 1,
    ) -> None:
        self.track = Track(f"env worker {worker_id}", "wait_ticket")
        self.rollouts: list[GroupRollout] = []
        for group, (env, sampler) in enumerate(groups):
            kind = GroupRollout if env.batch_size is None else RowRollout
            key = worker_id, group, incarnation
            sizes = decisions, execute, noise_shape
            self.rollouts.append(kind(env, sampler, key, *sizes, seed, self.track, device, noise_hold))

    @property
    def resumes_exactly(self) -> bool:
        return all(rollout.env.resumes_exactly for rollout in self.rollouts)

    @property
    def tracks(self) -> list[Track]:
        return [self.track, *(rollout.track for rollout in self.rollouts)]

    def start(self, ticket: Ticket) -> ActRequest:
        """Begin a fragment of ``ticket.group``; return the request of its first decision."""
        assert self.rollouts[ticket.group].request is None, "the group is in the middle of a fragment"
        with self._working(ticket.group) as rollout:
            return rollout.start(ticket)

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        """Execute the actor's reply; return the next request, or the complete fragment."""
        with self._working(reply.group) as rollout:
            return rollout.advance(reply)

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.env.close()

    @contextmanager
    def _working(self, group: int) -> Iterator[GroupRollout]:
        rollout = self.rollouts[group]
        rollout.track.enter("record")
        self.track.enter("record")
        try:
            yield rollout
        finally:
            rollout.track.enter("wait_actor" if rollout.request else "wait_ticket")
            self.track.enter("wait_actor" if any(rollout.request for rollout in self.rollouts) else "wait_ticket")
