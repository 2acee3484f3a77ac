"""What every actor-critic policy has: chunk sizes, a state normaliser and a critic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor, nn

from embodied.core.errors import UserError, unknown_name
from embodied.core.types import EnvSpec, Obs
from policies.critic import Critic
from policies.networks import ACTIVATIONS
from policies.normalizer import RunningNormalizer


def check(valid: bool, key: str, got: object, allowed: str) -> None:
    """UserError that names the key, what it got and what is allowed, unless ``valid``."""
    if not valid:
        raise UserError(f"policy.{key}: got {got!r}, allowed: {allowed}")


def check_name(key: str, got: str, allowed: Collection[str]) -> None:
    """UserError with the nearest name unless ``got`` is one of ``allowed``."""
    if got not in allowed:
        raise unknown_name(f"policy.{key}", str(got), allowed)


def check_hidden(key: str, widths: object) -> None:
    """UserError unless ``widths`` is a sequence of at least one width, all of them positive integers."""
    valid = isinstance(widths, Sequence) and len(widths) > 0 and all(is_positive_int(width) for width in widths)
    check(valid, key, widths, "a list of one or more positive integers")


def is_positive_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class ActorCriticConfig:
    """Options that all policies share; configs/policy/*.yaml explains each. UserError on a bad value."""

    horizon: int = 4
    execute: int = 4
    critic_hidden: tuple[int, ...] = (128, 128)
    activation: str = "relu"

    def __post_init__(self) -> None:
        check(is_positive_int(self.horizon), "horizon", self.horizon, "an integer of at least 1")
        in_range = is_positive_int(self.execute) and self.execute <= self.horizon
        check(in_range, "execute", self.execute, f"1 to horizon ({self.horizon})")
        check_hidden("critic_hidden", self.critic_hidden)
        check_name("activation", self.activation, ACTIVATIONS)


class ActorCritic(nn.Module):
    """Base of all policies: a normaliser of the state vector and an asymmetric critic; subclasses add the actor."""

    must_match: tuple[str, ...] = ("activation",)
    reset_prefixes: tuple[str, ...] = ()
    optional_suffixes: tuple[str, ...] = ()

    def __init__(self, spec: EnvSpec, config: ActorCriticConfig, critic_inputs: int | None = None) -> None:
        """critic_inputs: size of what the critic gets beside the privileged observation; None is the state's."""
        super().__init__()
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
