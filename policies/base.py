"""What every actor-critic policy has: chunk sizes, a state normaliser and a critic."""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.options import Count, Widths, config_dataclass, one_of
from embodied.core.spec import Box, Discrete, EnvSpec
from embodied.core.types import Obs
from policies.critic import Critic
from policies.networks import ACTIVATIONS
from policies.normalizer import RunningNormalizer


@config_dataclass
class ActorCriticConfig:
    """Options that all policies share."""

    horizon: Count = 4
    """H, planned actions of a chunk. A flow that executes only some of them imitates worse (docs/flow_rl.md)."""
    execute: Count = 4
    """E, executed actions of a chunk, at most horizon."""
    critic_hidden: Widths = (128, 128)
    """Widths of the critic's hidden layers."""
    activation: Annotated[str, one_of(ACTIVATIONS)] = "relu"
    """Activation of the hidden layers."""

    def __post_init__(self) -> None:
        if self.execute > self.horizon:
            raise UserError(f"execute: got {self.execute}, allowed: at most horizon={self.horizon}")


SPACES = {
    Box: "continuous actions (policy=gaussian, flow or vla)",
    Discrete: "choices between discrete actions (policy=categorical)",
}


class ActorCritic(nn.Module):
    """Base of all policies: a normaliser of the state vector and an asymmetric critic; subclasses add the actor."""

    action_space: ClassVar[type] = Box
    must_match: tuple[str, ...] = ("activation",)
    optional_suffixes: tuple[str, ...] = ()

    def __init__(self, spec: EnvSpec, config: ActorCriticConfig, critic_inputs: int | None = None) -> None:
        """critic_inputs: size of what the critic gets beside the privileged observation; None is the state's.

        UserError for a task whose actions the policy cannot give.
        """
        super().__init__()
        if not isinstance(spec.action, self.action_space):
            needed, found = SPACES[self.action_space], SPACES[type(spec.action)]
            raise UserError(f"{type(self).__name__} gives {needed}, task {spec.task} needs {found}")
        self.spec = spec
        self.horizon = config.horizon
        self.execute = config.execute
        self.state_normalizer = RunningNormalizer(spec.state_dim)
        inputs = spec.state_dim if critic_inputs is None else critic_inputs
        self.critic = Critic(inputs, spec.privileged_dim, config.critic_hidden, config.activation)

    def normalized_state(self, obs: Obs) -> Tensor:
        """The actor's whole input, [N, S]."""
        state: Tensor = self.state_normalizer(obs["state"])
        return state

    def value(self, obs: Obs) -> Tensor:
        """Critic's value of each row of obs, [N]."""
        return self.state_value(self.normalized_state(obs), obs)

    def state_value(self, state: Tensor, obs: Obs) -> Tensor:
        """As ``value``, for a state that is already normalised."""
        value: Tensor = self.critic(state, obs.get("privileged"))
        return value

    def fit_normalizer(self, obs: Obs) -> None:
        """Take the statistics of obs["state"] [F, S], if it is there, and keep them from then on."""
        if "state" in obs:
            self.state_normalizer.fit(obs["state"])

    def update_normalizer(self, obs: Obs) -> None:
        """Fold obs["state"] and obs["privileged"] [..., D] into the running statistics."""
        self.state_normalizer.update(obs["state"])
        if self.critic.normalizer is not None:
            self.critic.normalizer.update(obs["privileged"])
