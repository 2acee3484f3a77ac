"""Progress of a group whose envs need not be stepped together: those that are done get decisions at once.

    request for rows that are done ──► sample ──► send ──► receive: rows that are done ──► record ──► request for them
                                                  (the other rows are in the simulator all the time)

A fragment is complete when each row has its T decisions: a row that has them waits for the others. The last request is
for the values of all rows, as that of a ``Cursor``. The noise of decision t of a row is the one that a ``Cursor`` would
draw, whatever the order in which rows are done. So the same weights draw the same decisions, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.device import CPU
from embodied.core.execution import clip_chunk, timestep_to
from embodied.core.protocols import RowByRow
from embodied.core.types import Fragment, Obs
from embodied.runtime.cursor import Cursor
from embodied.runtime.ledger import Ticket
from embodied.runtime.messages import ActReply, ActRequest
from embodied.runtime.recorder import Ends


class RowCursor(Cursor):
    """A cursor for a ``RowByRow``. ``obs``: the latest observation of every row."""

    _asked: Tensor
    """Rows of the request under way; none if it is for the values of all."""
    _t_N: Tensor
    """Decisions of the present fragment that each row has made."""
    _noise_TN: Tensor
    """Noise of each decision of the fragment, [T, N, ...]."""

    def start(self, ticket: Ticket) -> ActRequest:
        num_envs = self.env.num_envs
        self._noise_TN = torch.stack([self.draw_noise() for _ in range(self.decisions)])
        self._t_N, self._asked = torch.zeros(num_envs, dtype=torch.int64), torch.arange(num_envs)
        self._under_way = 0
        self._ends: list[tuple[Ends, Obs]] = []  # since the latest request, with the last observations
        return super().start(ticket)

    def advance(self, reply: ActReply) -> ActRequest | Fragment:
        assert self.ticket is not None
        assert self._recorder is not None
        assert self.obs is not None
        self._record_ends(reply)
        if reply.sample is None:
            assert reply.value_N is not None
            fragment = self._recorder.fragment(self.obs if reply.obs is None else reply.obs, reply.value_N, self.ticket)
            self.ticket = self._recorder = None
            return fragment
        at = self._t_N[self._asked], self._asked
        self._recorder.observe(at, self._rows(self._asked) if reply.obs is None else reply.obs)
        action_nEA = clip_chunk(self.env, reply.sample.action_NHA, self.execute)
        self._recorder.decide(at, reply.sample, action_nEA.cpu())
        self._step(action_nEA)
        return self._request()

    def _step(self, action_nEA: Tensor) -> None:
        """Step the rows that were asked for, and wait until rows need a decision or all have made theirs."""
        assert isinstance(self.env, RowByRow)
        assert self._recorder is not None
        assert self.obs is not None
        self.enter("step")
        self.env.send(action_nEA.to(self.env.device), self._asked)
        self._under_way += len(self._asked)
        self._asked = self._asked[:0]
        while self._under_way and not len(self._asked):
            self.enter("step")
            rows, step = self.env.receive()
            self.enter("record")
            step = timestep_to(step, CPU)
            self._check(step, rows)
            at = self._t_N[rows], rows
            self._recorder.result(at, step)
            if len(step.final_ids):
                self._ends.append((Ends.of(step, *at), step.final_obs))
            for key, value in step.obs.items():
                self.obs[key][rows] = value
            self._under_way -= len(rows)
            self._t_N[rows] += 1
            self._asked = rows[self._t_N[rows] < self.decisions]

    def _record_ends(self, reply: ActReply) -> None:
        """Keep the last observations of the episodes that ended before the request, and their values."""
        if not self._ends:
            return
        assert self._recorder is not None
        assert reply.final_value_M is not None
        sizes = [len(ends.env_M) for ends, _ in self._ends]
        seen = reply.final_obs or _joined([obs for _, obs in self._ends])
        parts = zip(*(value.split(sizes) for value in seen.values()), strict=True)
        for (ends, _), value_M, part in zip(self._ends, reply.final_value_M.split(sizes), parts, strict=True):
            self._recorder.end(ends, value_M, dict(zip(seen, part, strict=True)))
        self._ends = []

    def _request(self) -> ActRequest:
        """Request decisions of the rows that wait for one, or after the last decisions the values of all rows."""
        assert self.obs is not None
        final_obs = _joined([obs for _, obs in self._ends]) if self._ends else None
        if not len(self._asked):
            return ActRequest(self.worker, self.group, self.obs, None, final_obs)
        noise = self._noise_TN[self._t_N[self._asked], self._asked]
        return ActRequest(self.worker, self.group, self._rows(self._asked), noise, final_obs)

    def _rows(self, rows: Tensor) -> Obs:
        assert self.obs is not None
        return {key: value[rows] for key, value in self.obs.items()}


def _joined(parts: list[Obs]) -> Obs:
    return {key: torch.cat([obs[key] for obs in parts]) for key in parts[0]}
