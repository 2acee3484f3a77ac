"""Options of PPO, and of what builds on it."""

from __future__ import annotations

from dataclasses import dataclass

from algos import losses
from embodied.core.errors import UserError, unknown_name

SCHEDULES = ("fixed", "adaptive")


@dataclass(frozen=True)
class PPOConfig:
    """Options of PPO; configs/algo/ppo.yaml says what each one means. UserError on a value that is not allowed."""

    gamma: float = 0.97
    gae_lambda: float = 0.985
    epochs: int = 5
    num_minibatches: int = 4
    reduction: str = "sum"
    clip_range: float = 0.2
    dual_clip: float | None = None
    normalize_advantage: bool = True
    learning_rate: float = 7e-4
    critic_learning_rate: float | None = None
    schedule: str = "adaptive"
    desired_kl: float = 0.03
    target_kl: float | None = None
    max_grad_norm: float = 1.0
    entropy_coef: float = 0.0
    value_coef: float = 1.0
    value_loss: str = "mse"
    huber_delta: float = 1.0
    value_clip: float | None = None
    correction: str = "decoupled"
    proximal: str = "recompute"
    behaviour_cap: float = 5.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    max_staleness: int | None = None
    critic_warmup: int = 0
    reference_kl_coef: float = 0.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        names = {
            "schedule": SCHEDULES,
            "value_loss": losses.VALUE_LOSSES,
            "correction": losses.CORRECTIONS,
            "proximal": losses.PROXIMALS,
            "reduction": losses.REDUCTIONS,
        }
        for key, allowed in names.items():
            if getattr(self, key) not in allowed:
                raise unknown_name(f"algo.{key}", str(getattr(self, key)), allowed)
        for key in ("gamma", "gae_lambda"):
            self._require(key, 0 <= getattr(self, key) <= 1, "a number from 0 to 1")
        for key in ("epochs", "num_minibatches"):
            self._require(key, getattr(self, key) >= 1, "an integer of at least 1")
        for key in ("clip_range", "desired_kl", "max_grad_norm", "huber_delta", "behaviour_cap", "rho_bar", "c_bar"):
            self._require(key, getattr(self, key) > 0, "a number above 0")
        for key in ("learning_rate", "entropy_coef", "value_coef", "critic_warmup", "reference_kl_coef"):
            self._require(key, getattr(self, key) >= 0, "a number of at least 0")
        for key in ("critic_learning_rate", "target_kl", "value_clip", "max_staleness"):
            value = getattr(self, key)
            self._require(key, value is None or value >= 0, "null or a number of at least 0")
        self._require("ema_decay", 0 <= self.ema_decay < 1, "a number from 0 to below 1")
        self._require("dual_clip", self.dual_clip is None or self.dual_clip > 1, "null or a number above 1")
        exact = self.correction in ("decoupled", "vtrace") and self.proximal == "recompute"
        if self.reduction != "sum" and not exact:
            raise UserError(
                f"algo.reduction={self.reduction} needs proximal=recompute with algo.correction=decoupled or vtrace, "
                f"got {self.proximal} and {self.correction}"
            )
        if self.proximal == "interpolate" and self.correction != "decoupled":
            raise UserError(f"algo.proximal=interpolate needs algo.correction=decoupled, got '{self.correction}'")

    def _require(self, key: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise UserError(f"algo.{key} must be {allowed}, got {getattr(self, key)}")
