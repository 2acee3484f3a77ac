"""Buffers of a fragment, filled decision by decision."""

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
        self.shape = shape = decisions, num_envs
        self.obs: Obs = {}
        self.chain = self.reward_TNE = self.action_TNEA = torch.empty(0)  # allocated at the first decision, as ``obs``
        self.log_prob_TN, self.value_TN = torch.empty(shape), torch.empty(shape)
        self.num_steps_TN = torch.empty(shape, dtype=torch.int64)
        self.terminated_TN = torch.empty(shape, dtype=torch.bool)
        self.truncated_TN = torch.empty(shape, dtype=torch.bool)
        self.final_value_TN = torch.zeros(shape)
        self.version_TN = torch.empty(shape, dtype=torch.int64)
        self.final_obs: list[Obs] = []
        self.final_index: list[Tensor] = []
        self.episodes: list[EpisodeStats] = []

    def decide(self, at: At, obs: Obs, sample: PolicySample, action_NEA: Tensor) -> None:
        """Copy the observations of decisions ``at``, the decisions and the executed actions."""
        if not self.obs:
            self.obs = {key: self._buffer(value) for key, value in obs.items()}
            self.chain, self.action_TNEA = self._buffer(sample.chain), self._buffer(action_NEA)
        for key, buffer in self.obs.items():
            buffer[at] = obs[key]
        self.chain[at] = sample.chain
        self.action_TNEA[at] = action_NEA
        self.log_prob_TN[at] = sample.log_prob_N
        self.value_TN[at] = sample.value_N
        self.version_TN[at] = sample.version_N

    def result(self, at: At, step: Timestep) -> None:
        """Copy the outcome of decisions ``at``."""
        if not len(self.reward_TNE):
            self.reward_TNE = self._buffer(step.reward_NE)
        self.reward_TNE[at] = step.reward_NE
        self.num_steps_TN[at] = step.num_steps_N
        self.terminated_TN[at] = step.terminated_N
        self.truncated_TN[at] = step.truncated_N
        if len(step.episodes):
            self.episodes.append(step.episodes.counted())

    def end(self, index_M2: Tensor, value_M: Tensor, final_obs: Obs) -> None:
        """Keep last observations [M, ...] of episodes and their values. index_M2: decision and env of each end."""
        at = index_M2[:, 0], index_M2[:, 1]
        value_M = torch.where(self.num_steps_TN[at] > 0, value_M, self.value_TN[at])
        self.final_value_TN[at] = torch.where(self.truncated_TN[at], value_M, 0.0)
        self.final_obs.append(final_obs)
        self.final_index.append(index_M2)

    def fragment(self, last_obs: Obs, bootstrap_value_N: Tensor, ticket: Ticket) -> Fragment:
        """Return the fragment of all decisions before ``last_obs``. FloatingPointError if a number is not finite."""
        self._check_finite(last_obs, bootstrap_value_N, ticket)
        ends = self.final_obs
        return Fragment(
            obs=self.obs,
            chain=self.chain,
            log_prob_TN=self.log_prob_TN,
            value_TN=self.value_TN,
            reward_TNE=self.reward_TNE,
            num_steps_TN=self.num_steps_TN,
            terminated_TN=self.terminated_TN,
            truncated_TN=self.truncated_TN,
            final_value_TN=self.final_value_TN,
            bootstrap_value_N=bootstrap_value_N,
            version_TN=self.version_TN,
            episodes=EpisodeStats.concatenate(self.episodes),
            action_TNEA=self.action_TNEA,
            last_obs={key: value.clone() for key, value in last_obs.items()},
            final_obs={key: torch.cat([obs[key] for obs in ends]) for key in ends[0]} if ends else {},
            final_index_M2=torch.cat([torch.empty(0, 2, dtype=torch.int64), *self.final_index]),
            worker=ticket.worker,
            group=ticket.group,
            incarnation=ticket.incarnation,
            sequence=ticket.sequence,
        )

    def _check_finite(self, last_obs: Obs, bootstrap_value_N: Tensor, ticket: Ticket) -> None:
        """Raise FloatingPointError for numbers that are not finite, also those observed at ends of episodes."""
        finite_N = torch.ones(self.shape[1], dtype=torch.bool)
        for key in VECTOR_KEYS & self.obs.keys():
            finite_N &= (self.obs[key].isfinite().all(-1).all(0) & last_obs[key].isfinite().all(-1)).cpu()
            for index_M2, obs in zip(self.final_index, self.final_obs, strict=True):
                finite_N[index_M2[~obs[key].isfinite().all(-1).cpu(), 1]] = False
        numbers = {
            "observations": finite_N,
            "rewards": self.reward_TNE.isfinite().all(-1).all(0),
            "log-probabilities": self.log_prob_TN.isfinite().all(0),
            "values": (self.value_TN + self.final_value_TN).isfinite().all(0) & bootstrap_value_N.isfinite(),
        }
        broken = [name for name, finite_N in numbers.items() if not bool(finite_N.all())]
        if broken:
            envs = (~torch.stack([*numbers.values()]).all(0)).nonzero().squeeze(-1)[:5].tolist()
            where = f"env {', '.join(map(str, envs))} in group {ticket.group} of env worker {ticket.worker}"
            why = "the simulation or the policy has diverged; nothing is learned from it"
            raise FloatingPointError(f"{' and '.join(broken)} of {where} are not finite: {why}")

    def _buffer(self, like: Tensor) -> Tensor:
        return torch.empty((*self.shape, *like.shape[1:]), dtype=like.dtype, device=like.device)
