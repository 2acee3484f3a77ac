"""A fragment of a group whose envs need not be stepped together: those that are done get decisions at once.

    request for rows that are done ──► sample ──► send ──► receive: rows that are done ──► record ──► request for them
                                                  (the other rows are in the simulator all the time)

A fragment is complete when each row has its T decisions: a row that has them waits for the others. The last request is
for the values of all rows. The noise of decision t of a row is the one that an ``OpenFragment`` would draw, whatever
the order in which rows are done. So the same weights draw the same decisions, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.device import CPU
from embodied.core.execution import clip_chunk, timestep_to
from embodied.core.types import Obs, PolicySample
from embodied.runtime.collecting.open_fragment import OpenFragment
from embodied.runtime.collecting.recorder import At
from embodied.runtime.collecting.rollout import GroupRollout
from embodied.runtime.ledger import Ticket


class OpenRowFragment(OpenFragment):
    """A fragment of a group with a ``batch_size``. ``obs`` of the rollout: the latest observation of every row."""

    def __init__(self, rollout: GroupRollout, ticket: Ticket) -> None:
        super().__init__(rollout, ticket)
        num_envs = rollout.env.num_envs
        self._noise_TN = torch.stack([rollout.draw_noise() for _ in range(rollout.decisions)])
        self._t_N = torch.zeros(num_envs, dtype=torch.int64)  # decisions that each row has made
        self._asked = torch.arange(num_envs)  # rows of the latest request; none if it is for the values of all
        self._under_way = 0  # rows in the simulator

    def _at(self) -> At:
        return self._t_N[self._asked], self._asked

    def _asked_obs(self) -> Obs:
        obs, asked = self.rollout.obs, self._asked
        return {key: value[asked] for key, value in obs.items()} if len(asked) else obs

    def _noise(self) -> Tensor | None:
        return self._noise_TN[self._t_N[self._asked], self._asked] if len(self._asked) else None

    def _step(self, sample: PolicySample) -> None:
        """Step the rows that were asked for, and wait until rows need a decision or all have made theirs."""
        rollout, env = self.rollout, self.rollout.env
        action_nEA = clip_chunk(env, sample.action_NHA, rollout.execute)
        self._recorder.decide(self._at(), sample, action_nEA.cpu())
        rollout.enter("step")
        env.send(action_nEA.to(env.device), self._asked)
        self._under_way += len(self._asked)
        self._asked = self._asked[:0]
        while self._under_way and not len(self._asked):
            rollout.enter("step")
            rows, step = env.receive()
            rollout.enter("record")
            step = timestep_to(step, CPU)
            rollout.check(step, rows)
            decision_n = self._t_N[rows]
            self._record_result(step, (decision_n, rows), decision_n, rows)
            for key, value in step.obs.items():
                rollout.obs[key][rows] = value
            self._under_way -= len(rows)
            self._t_N[rows] += 1
            self._asked = rows[self._t_N[rows] < rollout.decisions]
