"""Buffers of a fragment, filled decision by decision."""

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.episodes import EpisodeStats
from embodied.core.types import Fragment, Obs, PolicySample, Timestep
from embodied.runtime.ledger import Ticket

VECTOR_KEYS = {"state", "privileged"}
"""Keys of observations that are numbers; others are images, indices and what a policy has made of them."""
At = int | tuple[Tensor, Tensor]
"""Decisions of a fragment: t, for all envs, or decisions [n] of envs [n]."""


class Recorder:
    """Buffers [T, N, ...] of one fragment, filled for all envs at once or for some.

    Every fragment has new ones, because the learner keeps them. Observations, actions and chains are on the device that
    they come from, the numbers of decisions on the CPU.
    """

    def __init__(self, decisions: int, num_envs: int) -> None:
        self.shape = decisions, num_envs
        self.obs: Obs = {}
        self.columns: dict[str, Tensor] = {"final_value_TN": torch.zeros(self.shape)}  # by their names in ``Fragment``
        self.final_obs: list[Obs] = []
        self.final_index: list[Tensor] = []
        self.episodes: list[EpisodeStats] = []

    def decide(self, at: At, obs: Obs, sample: PolicySample, action_NEA: Tensor) -> None:
        """Copy the observations of decisions ``at``, the decisions and the executed actions."""
        self._put(self.obs, at, obs)
        assert sample.version_N is not None
        decision = {"chain": sample.chain, "action_TNEA": action_NEA, "version_TN": sample.version_N}
        self._put(self.columns, at, decision | {"log_prob_TN": sample.log_prob_N, "value_TN": sample.value_N})

    def result(self, at: At, step: Timestep) -> None:
        """Copy the outcome of decisions ``at``."""
        outcome = {"reward_TNE": step.reward_NE, "num_steps_TN": step.num_steps_N}
        ends = {"terminated_TN": step.terminated_N, "truncated_TN": step.truncated_N}
        self._put(self.columns, at, outcome | ends)
        if len(step.episodes):
            self.episodes.append(step.episodes.counted())

    def end(self, index_M2: Tensor, value_M: Tensor, final_obs: Obs) -> None:
        """Keep last observations [M, ...] of episodes and their values. index_M2: decision and env of each end."""
        at, columns = (index_M2[:, 0], index_M2[:, 1]), self.columns
        value_M = torch.where(columns["num_steps_TN"][at] > 0, value_M, columns["value_TN"][at])
        columns["final_value_TN"][at] = torch.where(columns["truncated_TN"][at], value_M, 0.0)
        self.final_obs.append(final_obs)
        self.final_index.append(index_M2)

    def fragment(self, last_obs: Obs, bootstrap_value_N: Tensor, ticket: Ticket) -> Fragment:
        """Return the fragment of all decisions before ``last_obs``. FloatingPointError if a number is not finite."""
        self._check_finite(last_obs, bootstrap_value_N, ticket)
        ends = self.final_obs
        return Fragment(
            obs=self.obs,
            bootstrap_value_N=bootstrap_value_N,
            episodes=EpisodeStats.concatenate(self.episodes),
            last_obs={key: value.clone() for key, value in last_obs.items()},
            final_obs={key: torch.cat([obs[key] for obs in ends]) for key in ends[0]} if ends else {},
            final_index_M2=torch.cat([torch.empty(0, 2, dtype=torch.int64), *self.final_index]),
            worker=ticket.worker,
            group=ticket.group,
            incarnation=ticket.incarnation,
            sequence=ticket.sequence,
            **self.columns,
        )

    def _check_finite(self, last_obs: Obs, bootstrap_value_N: Tensor, ticket: Ticket) -> None:
        """Raise FloatingPointError for numbers that are not finite, also those observed at ends of episodes."""
        columns, finite_N = self.columns, torch.ones(self.shape[1], dtype=torch.bool)
        value_TN = columns["value_TN"] + columns["final_value_TN"]
        for key in VECTOR_KEYS & self.obs.keys():
            finite_N &= (self.obs[key].isfinite().all(-1).all(0) & last_obs[key].isfinite().all(-1)).cpu()
            for index_M2, obs in zip(self.final_index, self.final_obs, strict=True):
                finite_N[index_M2[~obs[key].isfinite().all(-1).cpu(), 1]] = False
        numbers = {
            "observations": finite_N,
            "rewards": columns["reward_TNE"].isfinite().all(-1).all(0),
            "log-probabilities": columns["log_prob_TN"].isfinite().all(0),
            "values": value_TN.isfinite().all(0) & bootstrap_value_N.isfinite(),
        }
        broken = [name for name, finite_N in numbers.items() if not bool(finite_N.all())]
        if broken:
            envs = (~torch.stack([*numbers.values()]).all(0)).nonzero().squeeze(-1)[:5].tolist()
            where = f"env {', '.join(map(str, envs))} in group {ticket.group} of env worker {ticket.worker}"
            why = "the simulation or the policy has diverged; nothing is learned from it"
            raise FloatingPointError(f"{' and '.join(broken)} of {where} are not finite: {why}")

    def _put(self, buffers: dict[str, Tensor], at: At, values: Mapping[str, Tensor]) -> None:
        """Copy values of decisions ``at`` into buffers, which are allocated with the first values of a name."""
        for name, value in values.items():
            if name not in buffers:
                buffers[name] = torch.empty((*self.shape, *value.shape[1:]), dtype=value.dtype, device=value.device)
            buffers[name][at] = value
