"""A policy that draws action chunks by denoising, trainable by RL from scratch and by imitation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from embodied.core.options import Widths, config_dataclass
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs
from policies.flow.chains import ChainConfig, FlowChains
from policies.flow.network import Denoiser, StateEncoding, time_features
from policies.flow.step import interpolate, time_grid, velocity_to

MIN_LOSS_TIME = 0.05  # lower bound of the 1/t weight in the imitation loss, as in Li & He (2025)


@config_dataclass
class FlowConfig(ChainConfig):
    """Options of FlowPolicy."""

    actor_hidden: Widths = (128, 128)
    """Hidden layers of the state encoder, computed once per decision."""
    head_hidden: Widths = (128,)
    """Hidden layers of the denoiser, computed K times per decision."""
    prediction: Literal["action", "velocity"] = "action"
    """What the network predicts: the clean action (from scratch) or the velocity (as pi0)."""


class FlowPolicy(FlowChains):
    """A flow on the state vector; W = A.

    Parametrisation. By default the network predicts the clean action f(x, t, state) and the velocity is ``(x - f)/t``
    (x-prediction: Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise"). The last Euler step then
    lands on f exactly, so the initial noise is contracted away and an untrained policy is a Gaussian around f ~ 0 with
    the last step's sigma: RL from scratch starts as Gaussian PPO does. ``prediction: velocity`` is as in pi0.
    """

    must_match = ("activation", "prediction")
    not_imitated = ("critic.", "noise_network.")

    grid_features: Tensor

    def __init__(self, spec: EnvSpec, config: FlowConfig) -> None:
        chunk = config.horizon * spec.action_dim
        super().__init__(spec, config, (config.head_hidden[-1], chunk), spec.action_dim, spec.state_dim)
        self.predicts_velocity = config.prediction == "velocity"
        self.denoiser = Denoiser(spec.state_dim, chunk, config.actor_hidden, config.head_hidden, config.activation)
        self.register_buffer("grid_features", time_features(time_grid(config.denoise_steps)).float(), persistent=False)

    def encode(self, obs: Obs) -> StateEncoding:
        return self.denoiser.encode(self.normalized_state(obs))

    def expand_steps(self, code: StateEncoding) -> StateEncoding:
        return code.unsqueeze(1)

    def code_value(self, code: StateEncoding, obs: Obs) -> Tensor:
        return self.state_value(code.state, obs)

    def value(self, obs: Obs) -> Tensor:
        return self.state_value(self.normalized_state(obs), obs)

    def velocity(self, code: StateEncoding, x: Tensor, k: int | slice | Tensor) -> Tensor:
        return self.velocity_at(code, x, self.grid[k], self.grid_features[k])

    def velocity_at(self, code: StateEncoding, x: Tensor, t: Tensor, time: Tensor) -> Tensor:
        """Velocity at x [..., H, A] and any t [...], whose features are ``time``."""
        features = self.denoiser.features(code, x.flatten(-2), time)
        return self.to_velocity(self.denoiser.predict(code, features), x, t)

    def noisy_velocity(self, code: StateEncoding, x: Tensor, k: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        assert self.noise_network is not None
        features = self.denoiser.features(code, x.flatten(-2), self.grid_features[k])
        prediction, sigma = self.denoiser.predict_jointly(code, features, self.noise_network)
        return self.to_velocity(prediction, x, self.grid[k]), sigma.view_as(x)

    def to_velocity(self, prediction: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The denoiser's prediction [..., H*A] at x [..., H, A], t [...] as a velocity [..., H, A]."""
        prediction = prediction.reshape(x.shape)
        return prediction if self.predicts_velocity else velocity_to(prediction, x, t[..., None, None])

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, generator: torch.Generator) -> Tensor:
        """Flow-matching loss of demonstrated chunks, a scalar: mean squared error of the velocity ``noise - action``.

        With the action predicted, the error of the velocity is that of the action over t; t is bounded below by
        MIN_LOSS_TIME there, which only takes weight from the last, easiest times.
        """
        noise, t = self.draw_path(action_NHA, generator)
        t_N11 = t[:, None, None]
        x = interpolate(action_NHA, noise, t_N11)
        velocity = self.velocity_at(self.encode(obs), x, t, time_features(t))
        error = velocity - (noise - action_NHA)
        if not self.predicts_velocity:
            error = error * (t_N11 / t_N11.clamp_min(MIN_LOSS_TIME))
        return error.square().mean()
