"""Categorical distributions over discrete actions, with masks of the allowed choices."""

from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.spec import Box, Discrete, EnvSpec, MultiDiscrete
from embodied.core.types import Evaluation, Obs, PolicySample
from embodied.policies.base import ActorCritic
from embodied.policies.config import CategoricalConfig
from embodied.policies.networks import mlp
from embodied.policies.pixels import encoder_of

IMPOSSIBLE = float("-inf")


class CategoricalPolicy(ActorCritic):
    """Independent choices for the A dimensions of the H actions of a chunk, each from a softmax over its logits.

    A choice is drawn as the argmax of logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014). The chain holds the
    choices, float32 [N, 1, H, A]. The log-probability of a decision is the sum over its executed choices.

    Dimension i has ``counts[i]`` choices, C in all. Distributions are padded to M, the largest of them: a choice beyond
    ``counts[i]``, and one that ``obs["action_mask"]`` [N, C] forbids, has log-probability -inf. It is never drawn, and
    it has no part in log-probability, entropy and KL.

    With cameras, the logits also depend on their images (``images.<camera>`` uint8 [N, h, w, 3]).
    """

    recordable = True
    action_spaces: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete)
    must_match = ("activation", "cameras", "grey")

    exists_AM: Tensor
    """bool, whether dimension i has choice j."""
    place_C: Tensor
    """Where each of the C choices is in ``exists_AM``, flattened, int64."""

    def __init__(self, spec: EnvSpec, config: CategoricalConfig) -> None:
        """Build the networks. UserError also for a chunk of several actions where masks hold for one."""
        super().__init__(spec, config, encoder=encoder_of(spec, config))
        assert not isinstance(spec.action, Box)
        if spec.action_mask and config.horizon > 1:
            why = f"because the action masks of task {spec.task} hold for the next action alone"
            raise UserError(f"policy.horizon: got {config.horizon}, allowed: 1, {why}")
        counts = torch.tensor(spec.action.counts)
        self.register_buffer("exists_AM", torch.arange(int(counts.max())) < counts[:, None], persistent=False)
        self.register_buffer("place_C", self.exists_AM.flatten().nonzero().squeeze(-1), persistent=False)
        self.noise_shape = self.plan_noise_shape = (config.horizon, *self.exists_AM.shape)  # [H, A, M]
        chunk = config.horizon * int(counts.sum())
        self.actor = mlp(self.num_inputs, config.actor_hidden, chunk, config.activation, 0.01)

    def log_probs(self, inputs: Tensor, mask_NC: Tensor | None = None) -> Tensor:
        """Return the log-probability of every choice for inputs [N, I], [N, H, A, M].

        mask_NC: bool, the allowed choices; None allows all.
        """
        logits_NHC: Tensor = self.actor(inputs).view(len(inputs), self.horizon, -1)
        if mask_NC is not None:
            logits_NHC = logits_NHC.masked_fill(~mask_NC[:, None], IMPOSSIBLE)
        logits = logits_NHC.new_full((len(inputs), self.horizon, self.exists_AM.numel()), IMPOSSIBLE)
        return logits.index_copy(-1, self.place_C, logits_NHC).view(-1, *self.noise_shape).log_softmax(-1)

    @torch.no_grad()
    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """Return the likeliest choices, or with noise [N, H, A, M] drawn ones, int64 [N, H, A]."""
        return _choose(self.log_probs(self.inputs(obs), obs.get("action_mask")), noise)

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row with noise [N, H, A, M]."""
        inputs = self.inputs(obs)
        log_probs = self.log_probs(inputs, obs.get("action_mask"))
        choice = _choose(log_probs, noise)
        log_prob = _of_choice(log_probs, choice)[:, : self.execute].sum((1, 2))
        value = self.state_value(inputs, obs)
        return PolicySample(choice, log_prob, value, choice.float().unsqueeze(1))

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Return log-probability and entropy of the executed choices, and the value; chain: [B, 1, H, A]."""
        inputs = self.inputs(obs)
        log_probs = self.log_probs(inputs, obs.get("action_mask"))[:, : self.execute]
        log_prob_BE = _of_choice(log_probs, chain[:, 0, : self.execute].long()).sum(-1)
        entropy_B = -(log_probs.exp() * _finite(log_probs)).sum((1, 2, 3))
        terms = self.execute * len(self.exists_AM)
        return Evaluation.of(log_prob_BE, entropy_B, self.state_value(inputs, obs), log_probs, terms)

    def kl_divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Return KL(p || q) of choices with log-probabilities [B, E, A, M] under the same masks, [B]."""
        return (p.exp() * (_finite(p) - _finite(q))).sum((1, 2, 3))


def _choose(log_probs: Tensor, noise: Tensor | None) -> Tensor:
    """Return the argmax of log-probabilities [..., M], with Gumbel noise added if noise is given, int64 [...].

    A standard normal z becomes Gumbel noise -log(-log(Phi(z))); log(Phi) is accurate in both tails.
    """
    if noise is not None:
        log_probs = log_probs - torch.log(-torch.special.log_ndtr(noise.to(log_probs)))
    return log_probs.argmax(-1)


def _of_choice(log_probs: Tensor, choice: Tensor) -> Tensor:
    return log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def _finite(log_probs: Tensor) -> Tensor:
    """Return log-probabilities with 0 for impossible choices, whose probability 0 times -inf would be NaN."""
    return log_probs.masked_fill(log_probs == IMPOSSIBLE, 0.0)
