"""Base of all policies: chunk sizes, a state normaliser, and a critic that a deployed policy does not need."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import Box, Discrete, EnvSpec, MultiDiscrete
from embodied.core.types import Obs
from embodied.policies.config import ActorCriticConfig
from embodied.policies.likelihood import gaussian_kl
from embodied.policies.networks import mlp
from embodied.policies.normalizer import RunningNormalizer
from embodied.policies.pixels import PixelEncoder

SMALLEST_UNIT = 1e-9  # of values, for rewards that are all 0
SPACE_NAMES = {
    Box: "continuous actions (policy=gaussian, flow or vla)",
    Discrete: "choices between discrete actions (policy=categorical)",
    MultiDiscrete: "choices between discrete actions (policy=categorical)",
}


class Critic(nn.Module):
    """V(inputs, privileged) with hidden layers of its own (Pinto et al. 2018, asymmetric actor critic).

    It contains the normaliser of the privileged observation, so that a deployed policy does not need that either.
    """

    unit: Tensor | None
    """float32 [], value of an output of 1 of the network; None is 1."""

    def __init__(
        self, inputs: int, privileged_dim: int, hidden: Sequence[int], activation: str, scaled: bool = False
    ) -> None:
        super().__init__()
        self.normalizer = RunningNormalizer(privileged_dim) if privileged_dim else None
        # In unknown units an output of 1 may be far above all returns, and the first targets contain the outputs.
        self.network = mlp(inputs + privileged_dim, hidden, 1, activation, gain=0.0 if scaled else 1.0)
        self.register_buffer("unit", torch.ones(()) if scaled else None)

    def forward(self, inputs: Tensor, privileged: Tensor | None) -> Tensor:
        """Return the value [...] of inputs [..., I] (a normalised state) and a raw privileged observation [..., P].

        privileged: None if P is 0. ValueError if it is None otherwise.
        """
        if self.normalizer is not None:
            if privileged is None:
                raise ValueError("the critic needs obs['privileged'], which this observation lacks")
            inputs = torch.cat((inputs, self.normalizer(privileged)), dim=-1)
        value: Tensor = self.network(inputs).squeeze(-1)
        return value if self.unit is None else value * self.unit

    @torch.no_grad()
    def change_unit(self, unit: Tensor) -> None:
        """Replace the unit, and scale the last layer so that no value changes."""
        assert self.unit is not None
        for parameter in self.network[-1].parameters():
            parameter.mul_(self.unit / unit)
        self.unit.copy_(unit)


class ActorCritic(Policy):
    """A normaliser of the state vector and an asymmetric critic; subclasses add the actor.

    With an encoder of images, actor and critic share its features, and it learns from the losses of both.
    """

    action_spaces: ClassVar[tuple[type, ...]] = (Box,)
    """Classes of the action spaces that the policy supports."""
    must_match: tuple[str, ...] = ("activation",)

    def __init__(
        self,
        spec: EnvSpec,
        config: ActorCriticConfig,
        critic_inputs: int | None = None,
        encoder: PixelEncoder | None = None,
    ) -> None:
        """Build normaliser and critic. UserError if the policy does not support the task's action space.

        critic_inputs: size of the critic's input without the privileged observation; None: that of ``inputs``.
        encoder: reads the images.
        """
        super().__init__()
        if not isinstance(spec.action, self.action_spaces):
            given, needed = SPACE_NAMES[self.action_spaces[0]], SPACE_NAMES[type(spec.action)]
            raise UserError(f"{type(self).__name__} gives {given}, task {spec.task} needs {needed}")
        self.spec = spec
        self.horizon = config.horizon
        self.execute = config.execute
        self.state_normalizer = RunningNormalizer(spec.state_dim)
        self.encoder = encoder
        self.num_inputs = spec.state_dim + (encoder.size if encoder else 0)
        inputs = self.num_inputs if critic_inputs is None else critic_inputs
        self.critic = Critic(inputs, spec.privileged_dim, config.critic_hidden, config.activation, config.scale_values)

    def normalized_state(self, obs: Obs) -> Tensor:
        """Return the standardised state vector, [N, S]."""
        state: Tensor = self.state_normalizer(obs["state"])
        return state

    def inputs(self, obs: Obs) -> Tensor:
        """Return the standardised state and the features of the images, if any, side by side, [N, I]."""
        state = self.normalized_state(obs)
        return state if self.encoder is None else torch.cat((state, self.encoder(obs)), -1)

    def value(self, obs: Obs) -> Tensor:
        return self.state_value(self.inputs(obs), obs)

    def state_value(self, inputs: Tensor, obs: Obs) -> Tensor:
        """Return the critic's value, [N], for inputs [N, I] and the privileged observation in ``obs``."""
        value: Tensor = self.critic(inputs, obs.get("privileged"))
        return value

    def scale_values(self, rms: Tensor, weight: float) -> float:
        unit = self.critic.unit
        if unit is None:
            return 1.0
        square = (1 - weight) * unit.square() + weight * rms.to(unit).square()
        self.critic.change_unit(square.sqrt().clamp_min(SMALLEST_UNIT))
        return float(unit)

    def kl_divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Return KL(p || q) of Gaussians with means and standard deviations [B, 2, ...], [B]."""
        return gaussian_kl(p, q)

    def fit_normalizer(self, obs: Obs) -> None:
        """Fit the statistics to obs["state"] [F, S], if obs has it, and freeze them."""
        if "state" in obs:
            self.state_normalizer.fit(obs["state"])

    def update_normalizer(self, obs: Obs) -> None:
        """Fold obs["state"] and obs["privileged"] [..., D] into the running statistics."""
        self.state_normalizer.update(obs["state"])
        if self.critic.normalizer is not None:
            self.critic.normalizer.update(obs["privileged"])
