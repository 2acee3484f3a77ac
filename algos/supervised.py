"""Supervised algorithms: imitation of demonstrated chunks (SFT), and grounding on labelled images.

Both use AdamW, a learning rate schedule, and an average of the weights. In grounding a fresh policy learns what images
show, and where the things are that an instruction names. A simulator gives the targets, for any number of scenes: the
words that describe a pixel, the role of a pixel in the instruction, and the positions of the object and the place that
the instruction names. Imitation and reinforcement learning then start from a policy that relates words to images. π0
starts from a model of captioned images instead.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from embodied.algos.adam import AdamW, update_average
from embodied.algos.config import GroundingConfig, SFTConfig, SupervisedConfig
from embodied.core.device import copied_to_cpu
from embodied.core.errors import UserError
from embodied.core.execution import obs_to
from embodied.core.policy import Policy
from embodied.core.types import Obs

VALIDATION_DRAWS = 8  # draws of noise and time per validation chunk, the same ones in every validation


class Supervised:
    """AdamW on the loss of a subclass. The policy is moved to ``device`` and trained in place.

    ``average`` is the policy with an exponential moving average of the weights; it is validated and deployed.
    ``seed`` seeds ``generator``, which draws noise, times and the order of the data.
    """

    explores: ClassVar[bool] = False

    def __init__(self, policy: Policy, config: SupervisedConfig, *, seed: int, device: torch.device) -> None:
        self.policy = policy.to(device)
        self.average = self.policy.duplicate().requires_grad_(False).eval()
        self.config, self.device = config, device
        self.updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = AdamW(self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self._set_learning_rate()

    def fit_normalizer(self, obs: Obs) -> None:
        """Fit the policy's normaliser to the data and freeze it. To be called before the first update."""
        for module in (self.policy, self.average):
            module.fit_normalizer(self.to_device(obs))

    def descend(self, loss: Tensor) -> float:
        """Take one step on ``loss`` and return its value.

        FloatingPointError, with weights and average unchanged, if the loss or the norm of its gradient is not finite.
        """
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        values = {"loss": float(loss.detach()), "norm of the gradient": float(norm)}
        broken = [f"{name} {value}" for name, value in values.items() if not math.isfinite(value)]
        if broken:
            raise FloatingPointError(f"update {self.updates + 1} is not finite: {', '.join(broken)}")
        self.optimizer.step()
        self.updates += 1
        self._set_learning_rate()
        decay = min(self.config.ema_decay, self.updates / (self.updates + 10))  # lower at first, to forget the start
        update_average(self.average, self.policy, decay)
        return values["loss"]

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the average weights on the CPU."""
        return copied_to_cpu(self.average.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return all that ``load_state_dict`` needs to continue exactly on a CPU (copies on the CPU).

        With it comes the state of torch's global generator, for policies with dropout.
        """
        return copied_to_cpu({
            "policy": self.policy.state_dict(), "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state(),
            "global_generator": torch.get_rng_state(), "updates": self.updates,
        })  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from what ``state_dict`` returned. UserError if it is not such a state."""
        try:
            self.policy.load_state_dict(state["policy"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"].cpu())
            if "global_generator" in state:  # earlier versions did not save it
                torch.set_rng_state(state["global_generator"].cpu())
            self.updates = int(state["updates"])
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"this is not the state of {type(self).__name__} on this policy: {error}") from error
        self._set_learning_rate()

    def to_device(self, obs: Obs) -> Obs:
        """Move observations to the device of the policy."""
        return obs_to(obs, self.device)

    def _set_learning_rate(self) -> None:
        """Set learning rate and weight decay of the next update from the configuration, not from a checkpoint."""
        warm = min(1.0, (self.updates + 1) / (self.config.warmup + 1))
        done = min(1.0, self.updates / self.config.updates)
        factor = warm * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.config.learning_rate * factor, self.config.weight_decay


# -- imitation ---------------------------------------------------------------------------------------------------------


class SFT(Supervised):
    """Train ``policy.imitation_loss`` with AdamW, plus ``policy.location_loss`` for a policy that was grounded."""

    trainer: ClassVar[str] = "imitation"
    config: SFTConfig

    def __init__(self, policy: Policy, config: SFTConfig, *, seed: int, device: torch.device) -> None:
        if policy.not_imitated is None:
            raise UserError(f"algo=sft needs a policy that can imitate, {type(policy).__name__} cannot")
        super().__init__(policy, config, seed=seed, device=device)

    @property
    def keeps_grounding(self) -> bool:
        """Whether updates need scenes too, so that a grounded policy does not forget how to predict positions."""
        return self.config.keep_grounding > 0 and self.policy.grounded

    def pick(self, frames_W: Tensor) -> Tensor:
        """Draw ``batch_size`` of the frames ``frames_W``, with replacement."""
        return frames_W[torch.randint(len(frames_W), (self.config.batch_size,), generator=self.generator)]

    def update(self, obs: Obs, action_BHA: Tensor, valid_BH: Tensor, scenes: Obs | None = None) -> float:
        """Take one step on a batch and return its loss. FloatingPointError as in ``descend``.

        valid_BH: which actions to imitate (``Policy.imitation_loss``). scenes: observations with
        ``target_positions``, for a policy that ``keeps_grounding``.
        """
        action_BHA, valid_BH = action_BHA.to(self.device), valid_BH.to(self.device)
        loss = self.policy.imitation_loss(self.to_device(obs), action_BHA, valid_BH, self.generator)
        if scenes is not None:
            loss = loss + self.config.keep_grounding * self.policy.location_loss(self.to_device(scenes))
        return self.descend(loss)

    @torch.no_grad()
    def validate(self, obs: Obs, action_BHA: Tensor, valid_BH: Tensor) -> float:
        """Return the loss of the average weights on held-out chunks, with the same noise and times in every call."""
        obs, action_BHA, valid_BH = self.to_device(obs), action_BHA.to(self.device), valid_BH.to(self.device)
        generator = torch.Generator().manual_seed(0)
        draws = [self.average.imitation_loss(obs, action_BHA, valid_BH, generator) for _ in range(VALIDATION_DRAWS)]
        return float(torch.stack(draws).mean())


# -- grounding ---------------------------------------------------------------------------------------------------------


class Grounding(Supervised):
    """Train ``policy.grounding_loss`` with AdamW: first on masks alone, then on positions too."""

    trainer: ClassVar[str] = "grounding"
    config: GroundingConfig

    def __init__(self, policy: Policy, config: GroundingConfig, *, seed: int, device: torch.device) -> None:
        if not policy.can_ground:
            raise UserError(f"algo=grounding needs a policy that sees and reads, {type(policy).__name__} does not")
        super().__init__(policy, config, seed=seed, device=device)

    def update(self, obs: Obs) -> float:
        """Take one step on labelled observations and return its loss. FloatingPointError as in ``descend``."""
        return self.descend(self.policy.grounding_loss(self.to_device(obs), self.trains_positions))

    @property
    def trains_positions(self) -> bool:
        """Whether the next update trains positions too."""
        return self.updates >= self.config.masks_only * self.config.updates

    @torch.no_grad()
    def validate(self, obs: Obs) -> float:
        """Return the loss of the average weights; it includes positions if the next update trains them."""
        return float(self.average.grounding_loss(self.to_device(obs), self.trains_positions))

    @torch.no_grad()
    def localization_rates(self, obs: Obs) -> dict[str, float]:
        """Return the mean of ``Policy.localization_hits`` with the average weights, by camera.

        Cameras that never see the object are left out.
        """
        hits = self.average.localization_hits(self.to_device(obs))
        return {camera: float(hit_M.float().mean()) for camera, hit_M in hits.items() if len(hit_M)}

    @torch.no_grad()
    def predict_positions(self, obs: Obs) -> Tensor:
        """Predict ``target_positions`` with the average weights, on the CPU."""
        return self.average.predict_positions(self.to_device(obs)).cpu()
