"""A fragment in the making: it requests decisions, executes them and records what happens.

    request: obs, noise ──► actor ──► advance: record ──► step the envs ──► record ──► next request ── … ──► Fragment

The last request is for values alone. The last observations of episodes that ended are in the next request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.execution import step_chunk
from embodied.core.types import Fragment, Obs, PolicySample, Timestep
from embodied.runtime.collecting.messages import ActReply, ActRequest
from embodied.runtime.collecting.recorder import At, Ends, Recorder
from embodied.runtime.collecting.rollout import GroupRollout
from embodied.runtime.ledger import Ticket


class OpenFragment:
    """A fragment of a group whose envs are stepped together."""

    def __init__(self, rollout: GroupRollout, ticket: Ticket) -> None:
        self.rollout, self.ticket = rollout, ticket
        self._recorder = Recorder(rollout.decisions, rollout.env.num_envs)
        self._ends: list[tuple[Ends, Obs]] = []  # since the latest request, with the last observations
        self._t = 0

    def request(self) -> ActRequest:
        """Request the next decision, or after the last decision values alone."""
        final_obs = _joined(self._ends) if self._ends else None
        return ActRequest(self.ticket.worker, self.ticket.group, self._asked_obs(), self._noise(), final_obs)

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        """Execute the actor's reply; return the next request, or the complete fragment."""
        self._record_ends(reply)
        obs = self._asked_obs() if reply.obs is None else reply.obs
        if reply.sample is None:
            assert reply.value_N is not None
            return self._recorder.fragment(obs, reply.value_N, self.ticket)
        self._recorder.observe(self._at(), obs)
        self._step(reply.sample)
        return self.request()

    # -- what differs if envs are not stepped together -----------------------------------------------------------------
    def _at(self) -> At:
        """Return the decisions of the latest request."""
        return self._t

    def _asked_obs(self) -> Obs:
        """Return the observations of the latest request."""
        return self.rollout.obs

    def _noise(self) -> Tensor | None:
        """Return the noise of the next decision; None if all have been made."""
        return self.rollout.draw_noise() if self._t < self.rollout.decisions else None

    def _step(self, sample: PolicySample) -> None:
        """Execute the decisions of a reply and record them."""
        rollout, t = self.rollout, self._t
        rollout.enter("step")
        action_NEA, step = step_chunk(rollout.env, sample.action_NHA, rollout.execute, rollout.device)
        rollout.enter("record")
        rollout.check(step)
        self._recorder.decide(t, sample, action_NEA)
        rows = torch.arange(rollout.env.num_envs)
        self._record_result(step, t, torch.full_like(rows, t), rows)
        rollout.obs = step.obs
        self._t += 1

    # ------------------------------------------------------------------------------------------------------------------
    def _record_result(self, step: Timestep, at: At, decision_N: Tensor, env_N: Tensor) -> None:
        """Keep the outcome of decisions ``at``, which are ``decision_N`` of envs ``env_N``."""
        self._recorder.result(at, step)
        if len(step.final_ids):
            self._ends.append((Ends.of(step, decision_N, env_N), step.final_obs))

    def _record_ends(self, reply: ActReply) -> None:
        """Keep the last observations of the episodes that ended before the request, and their values."""
        if not self._ends:
            return
        assert reply.final_value_M is not None
        sizes = [len(ends.env_M) for ends, _ in self._ends]
        seen = reply.final_obs or _joined(self._ends)
        parts = zip(*(value.split(sizes) for value in seen.values()), strict=True)
        for (ends, _), value_M, part in zip(self._ends, reply.final_value_M.split(sizes), parts, strict=True):
            self._recorder.end(ends, value_M, dict(zip(seen, part, strict=True)))
        self._ends = []


def _joined(ends: list[tuple[Ends, Obs]]) -> Obs:
    parts = [obs for _, obs in ends]
    return parts[0] if len(parts) == 1 else {key: torch.cat([obs[key] for obs in parts]) for key in parts[0]}
