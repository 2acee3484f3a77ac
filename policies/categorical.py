"""A categorical distribution over discrete actions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.options import Count, Widths, config_dataclass
from embodied.core.spec import Discrete, EnvSpec
from embodied.core.types import Evaluation, Obs, PolicySample
from policies.base import ActorCritic, ActorCriticConfig
from policies.networks import mlp


@config_dataclass
class CategoricalConfig(ActorCriticConfig):
    """Options of CategoricalPolicy."""

    horizon: Count = 1
    """H, planned actions of a chunk."""
    execute: Count = 1
    """E, executed actions of a chunk, at most horizon."""
    actor_hidden: Widths = (128, 128)
    """Widths of the actor's hidden layers."""


class CategoricalPolicy(ActorCritic):
    """Independent choices for the H actions of a chunk, each from a softmax over n logits.

    A choice is drawn as the argmax of logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014). The chain holds the
    choices, float32 [N, 1, H, 1]. The log-probability of a decision is the sum over its executed choices.
    """

    action_space: ClassVar[type] = Discrete
    not_imitated = ("critic.",)

    def __init__(self, spec: EnvSpec, config: CategoricalConfig) -> None:
        super().__init__(spec, config)
        assert isinstance(spec.action, Discrete)
        self.choices = spec.action.n
        self.actor = mlp(spec.state_dim, config.actor_hidden, config.horizon * self.choices, config.activation, 0.01)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[H, n]."""
        return (self.horizon, self.choices)

    @property
    def plan_noise_shape(self) -> tuple[int, ...]:
        """[H, n]."""
        return (self.horizon, self.choices)

    def log_probs(self, state: Tensor) -> Tensor:
        """Return the log-probability of every choice at a normalised state [N, S], [N, H, n]."""
        logits: Tensor = self.actor(state)
        return logits.view(-1, self.horizon, self.choices).log_softmax(-1)

    @torch.no_grad()
    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """Return the likeliest choices, or with noise [N, H, n] drawn ones, int64 [N, H, 1]."""
        return _choose(self.log_probs(self.normalized_state(obs)), noise)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row with noise [N, H, n]."""
        state = self.normalized_state(obs)
        log_probs = self.log_probs(state)
        choice = _choose(log_probs, noise)
        log_prob = log_probs.gather(-1, choice)[:, : self.execute].sum((1, 2))
        value = self.state_value(state, obs)
        version = torch.full(value.shape, -1, dtype=torch.int64, device=value.device)
        return PolicySample(choice, log_prob, value, choice.float().unsqueeze(1), version)

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Return log-probability and entropy of the executed choices, and the value; chain: [B, 1, H, 1]."""
        state = self.normalized_state(obs)
        log_probs = self.log_probs(state)
        log_prob_BE = log_probs.gather(-1, chain[:, 0].long())[:, : self.execute, 0]
        executed = log_probs[:, : self.execute]
        entropy_B = -(executed.exp() * executed).sum((1, 2))
        return Evaluation.of(log_prob_BE, entropy_B, self.state_value(state, obs), executed, self.execute)

    def kl_divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Return KL(p || q) of choices with log-probabilities [B, E, n], [B]."""
        return (p.exp() * (p - q)).sum((1, 2))


def _choose(log_probs: Tensor, noise: Tensor | None) -> Tensor:
    """Return the argmax of log-probabilities [N, H, n], with Gumbel noise added if noise is given, int64 [N, H, 1].

    A standard normal z becomes Gumbel noise -log(-log(Phi(z))); log(Phi) is accurate in both tails.
    """
    if noise is not None:
        log_probs = log_probs - torch.log(-torch.special.log_ndtr(noise.to(log_probs)))
    return log_probs.argmax(-1, keepdim=True)
