"""Base of supervised algorithms: AdamW, a learning rate schedule, and an average of the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.execution import obs_to
from embodied.core.options import FractionBelow1, NonNegative, NonNegativeInt, Positive, PositiveInt, config_dataclass
from embodied.core.policy import Policy
from embodied.core.types import Obs


@config_dataclass
class SupervisedConfig:
    """Options of Supervised."""

    learning_rate: Positive = 1e-3
    """Highest learning rate of AdamW, reached by a linear warm-up and followed by a cosine to 0."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of AdamW."""
    batch_size: PositiveInt = 256
    """Samples of an update."""
    updates: PositiveInt = 2000
    """Largest number of updates; the cosine ends there."""
    warmup: NonNegativeInt = 100
    """Updates of the linear warm-up."""
    ema_decay: FractionBelow1 = 0.995
    """Decay of the average of the weights over updates that is validated and kept."""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient."""
    validate_every: PositiveInt = 200
    """Updates between two validations."""


class Supervised:
    """AdamW on the loss of a subclass. The policy is moved to ``device`` and trained in place.

    ``average`` is the policy with an exponential moving average of the weights; it is validated and deployed.
    ``seed`` seeds ``generator``, which draws noise, times and the order of the data.
    """

    explores: ClassVar[bool] = False

    def __init__(self, policy: Policy, config: SupervisedConfig, *, seed: int, device: torch.device) -> None:
        self.policy = policy.to(device)
        self.average = copy.deepcopy(policy).requires_grad_(False)
        self.config, self.device = config, device
        self.updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
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
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.policy.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)
        return values["loss"]

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the average weights on the CPU."""
        return {key: value.clone().cpu() for key, value in self.average.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that ``load_state_dict`` needs to continue exactly (copies)."""
        return {
            "policy": {key: value.clone() for key, value in self.policy.state_dict().items()},
            "average": {key: value.clone() for key, value in self.average.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from what ``state_dict`` returned. UserError if it is not such a state."""
        try:
            self.policy.load_state_dict(state["policy"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"].cpu())
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
