"""A Gaussian over action chunks with a learned standard deviation, the usual actor of on-policy algorithms."""

import torch
from torch import Tensor

from embodied.core.spec import EnvSpec
from embodied.core.types import Evaluation, Obs, PolicySample
from embodied.policies.base import ActorCritic
from embodied.policies.config import ActorCriticConfig, GaussianConfig
from embodied.policies.likelihood import gaussian_entropy, gaussian_log_prob, sum_by_action, sum_executed
from embodied.policies.networks import BoundedStd, mlp
from embodied.policies.pixels import PixelEncoder, encoder_of


class GaussianChunk(ActorCritic):
    """A diagonal Gaussian over a chunk of numbers [H, A], which ``decode`` of a subclass turns into actions.

    The chain holds the drawn numbers, [N, 1, H, A].
    """

    scored_actions: int
    """Number of first rows of the chunk whose density counts: the rows that affect the executed actions."""
    bounded_std: BoundedStd
    """Standard deviation of the drawn numbers, learned."""

    def __init__(self, spec: EnvSpec, config: ActorCriticConfig, encoder: PixelEncoder | None = None) -> None:
        super().__init__(spec, config, encoder=encoder)
        self.plan_noise_shape = (config.horizon, spec.action_dim)
        self.noise_shape = (1, *self.plan_noise_shape)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the drawn numbers, [H, A]."""
        std: Tensor = self.bounded_std()
        return std

    def mean(self, inputs: Tensor) -> Tensor:
        """Return the mean of the drawn numbers [N, H, A] for inputs [N, I]."""
        raise NotImplementedError

    def decode(self, obs: Obs, drawn: Tensor) -> Tensor:
        """Return the planned chunk of actions [N, H, A] for drawn numbers [N, H, A]."""
        raise NotImplementedError

    @torch.no_grad()
    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """Return the chunk for the mean, or with noise [N, H, A] for a draw, [N, H, A]."""
        mean = self.mean(self.inputs(obs))
        return self.decode(obs, mean if noise is None else mean + self.std * noise.to(mean))

    @torch.no_grad()
    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row with noise [N, 1, H, A]."""
        inputs = self.inputs(obs)
        mean, std = self.mean(inputs), self.std
        value = self.state_value(inputs, obs)
        drawn = mean + std * noise[:, 0].to(mean)
        log_prob = sum_executed(gaussian_log_prob(drawn, mean, std).unsqueeze(1), self.scored_actions)
        return PolicySample(self.decode(obs, drawn), log_prob, value, drawn.unsqueeze(1))

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Return log-probability and entropy of the scored rows, and the value; chain: [B, 1, H, A]."""
        inputs = self.inputs(obs)
        mean, std = self.mean(inputs).unsqueeze(1), self.std
        log_prob_BE = sum_by_action(gaussian_log_prob(chain, mean, std), self.scored_actions)
        entropy_B = sum_executed(gaussian_entropy(std)[None, None], self.scored_actions).expand(len(chain))
        distribution = torch.stack((mean, std.expand_as(mean)), 1)[..., : self.scored_actions, :]
        terms = self.scored_actions * self.spec.action_dim
        return Evaluation.of(log_prob_BE, entropy_B, self.state_value(inputs, obs), distribution, terms)


class GaussianPolicy(GaussianChunk):
    """Actions ~ N(mean(state), std^2), with a learned std per action dimension that does not depend on the state.

    The mean is unbounded: the environment clips actions. With cameras, the mean also depends on their images
    (``images.<camera>`` uint8 [N, h, w, 3]).
    """

    recordable = True
    must_match = ("activation", "cameras", "grey")
    must_match_exploring = ("min_std", "max_std")
    not_imitated = ("critic.", "bounded_std.")

    def __init__(self, spec: EnvSpec, config: GaussianConfig) -> None:
        super().__init__(spec, config, encoder_of(spec, config))
        self.scored_actions = config.execute
        chunk = config.horizon * spec.action_dim
        self.actor = mlp(self.num_inputs, config.actor_hidden, chunk, config.activation, gain=0.01)
        stds = (config.min_std, config.max_std, config.init_std)
        self.bounded_std = BoundedStd((config.horizon, spec.action_dim), *stds)

    def mean(self, inputs: Tensor) -> Tensor:
        """Return the mean chunk [N, H, A] for inputs [N, I]."""
        mean: Tensor = self.actor(inputs)
        return mean.view(-1, self.horizon, self.spec.action_dim)

    def decode(self, obs: Obs, drawn: Tensor) -> Tensor:
        """Return ``drawn``: the numbers are the actions."""
        return drawn

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, valid_NH: Tensor, generator: torch.Generator) -> Tensor:
        """Return the mean squared error of the mean chunk where it is valid, a scalar; the generator is not used."""
        return (self.mean(self.inputs(obs)) - action_NHA).square()[valid_NH].mean()
