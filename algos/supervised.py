"""What learning from given targets has in common: AdamW, a warm-up and a cosine, and an average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from embodied.core.errors import UserError
from embodied.core.options import Count, Natural, NonNegative, Positive, ShareBelow1, config_dataclass
from embodied.core.protocols import Fitted
from embodied.core.types import Obs


@config_dataclass
class SupervisedConfig:
    """Options of Supervised."""

    learning_rate: Positive = 1e-3
    """Highest learning rate of AdamW: linear warm-up to it, then cosine to 0."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of AdamW."""
    batch_size: Count = 256
    """Samples of an update."""
    updates: Count = 2000
    """Updates at most."""
    warmup: Natural = 100
    """Updates until the full learning rate."""
    ema_decay: ShareBelow1 = 0.995
    """ShareBelow1 of the average of the weights that is validated and kept."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    validate_every: Count = 200
    """Updates between two validations."""


class Supervised:
    """AdamW on a loss that a subclass has. ``average`` holds the exponential moving average of the weights, which is
    what is validated and deployed. ``seed`` seeds ``generator``: noise, times and the order of the data.

    Learning rate: linear warm-up, then cosine to 0 over ``updates``.
    """

    explores: ClassVar[bool] = False

    def __init__(self, policy: nn.Module, config: SupervisedConfig, *, seed: int, device: torch.device) -> None:
        policy.to(device)
        self.policy = policy
        self.average = copy.deepcopy(policy).requires_grad_(False)
        self.config, self.device = config, device
        self.updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self._set_rate()

    def fit_normalizer(self, obs: Obs) -> None:
        """Take the statistics of what is observed from the data, for good. Before the first update."""
        for module in (self.policy, self.average):
            assert isinstance(module, Fitted)
            module.fit_normalizer(self.to_device(obs))

    def descend(self, loss: Tensor) -> float:
        """One step on ``loss``; its value. FloatingPointError if that is not finite."""
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        value = float(loss.detach())
        if value != value or value == float("inf"):
            raise FloatingPointError(f"loss {value} after {self.updates} updates")
        self.updates += 1
        self._set_rate()
        decay = min(self.config.ema_decay, self.updates / (self.updates + 10))  # the start is forgotten at once
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.policy.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)
        return value

    def weights(self) -> dict[str, Tensor]:
        """Of the average, copies on the CPU."""
        return {key: value.clone().cpu() for key, value in self.average.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``load_state_dict`` needs to go on exactly."""
        return {
            "policy": {key: value.clone() for key, value in self.policy.state_dict().items()},
            "average": {key: value.clone() for key, value in self.average.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """UserError if it is not such a state."""
        try:
            self.policy.load_state_dict(state["policy"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"].cpu())
            self.updates = int(state["updates"])
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"this is not the state of {type(self).__name__} on this policy: {error}") from error
        self._set_rate()

    def to_device(self, obs: Obs) -> Obs:
        return {key: value.to(self.device) for key, value in obs.items()}

    def _set_rate(self) -> None:
        """Those of the next update, as the configuration has them, whatever a checkpoint had."""
        warm = min(1.0, (self.updates + 1) / (self.config.warmup + 1))
        done = min(1.0, self.updates / self.config.updates)
        factor = warm * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.config.learning_rate * factor, self.config.weight_decay
