"""Options of the algorithms."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import (
    Fraction,
    FractionBelow1,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    config_dataclass,
)

Correction = Literal["decoupled", "vtrace", "tis", "aipo", "none"]
Reduction = Literal["sum", "mean", "action"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


@config_dataclass
class PPOConfig:
    """Options of PPO."""

    # returns
    gamma: Fraction = 0.97
    """Discount per control step; a decision of n control steps is discounted by gamma^n."""
    gae_lambda: Fraction = 0.985
    """GAE trace per control step, lambda^n per decision. 1 is Monte Carlo, 0 one-step TD."""

    # epochs
    epochs: PositiveInt = 5
    """Passes over each batch."""
    num_minibatches: PositiveInt = 4
    """Minibatches of nearly equal size, reshuffled every epoch; nothing is dropped."""
    target_kl: NonNegative | None = None
    """The epochs stop after one in which the mean KL of a decision from the start of the update is higher; null:
    never."""

    # policy loss
    reduction: Reduction = "sum"
    """Log-probability whose ratio is clipped: the decision's (sum, exact), its mean over the terms (mean), or that of
    each executed action (action). A clip_range of 0.2 becomes 0.003 for mean and 0.1 for action (docs/flow_rl.md)."""
    clip_range: Positive = 0.2
    """The ratio to the proximal policy is clipped to 1 +- this. Its scale depends on ``reduction``. If one of K denoise
    steps is drawn at random, it is divided by sqrt(K)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """c > 1: a negative advantage A contributes at least c * A; null: off."""
    normalize_advantage: bool = True
    """Whether advantages are scaled to zero mean and unit variance over the valid decisions of the batch."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""

    # value loss
    value_coef: NonNegative = 1.0
    """Weight of the value loss."""
    value_loss: Literal["mse", "huber"] = "mse"
    """Squared error or Huber loss."""
    huber_delta: Positive = 1.0
    """Error beyond which the Huber loss is linear."""
    value_clip: NonNegative | None = None
    """The value is clipped to within this of the behaviour critic's before the loss; null: off."""

    # optimiser (Adam)
    learning_rate: NonNegative = 7e-4
    """Learning rate; the initial one if schedule=adaptive, whose present rate is saved with the optimiser."""
    critic_learning_rate: NonNegative | None = None
    """Learning rate of parameters named critic.*; null: the same as learning_rate."""
    schedule: Literal["fixed", "adaptive"] = "adaptive"
    """adaptive: keep the KL of a minibatch near desired_kl (rule of rsl_rl). With one minibatch per update it is that
    after its step."""
    desired_kl: Positive = 0.03
    """Target for schedule=adaptive: KL of a decision from the start of the update, in nats, mean over a minibatch."""
    min_learning_rate: Positive = 1e-5
    """Lower bound of the learning rate for schedule=adaptive; the default is that of rsl_rl."""
    max_learning_rate: Positive = 1e-2
    """Upper bound of the learning rate for schedule=adaptive; the default is that of rsl_rl."""
    final_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the learning rates, of their bounds and of desired_kl that is left at ``total_steps``. They fall
    linearly from the hundredth update on; 1: they stay."""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient; a critic with its own learning rate is clipped separately."""

    # off-policy correction
    correction: Correction = "decoupled"
    """Correction for data of older weights: decoupled (AReaL), vtrace (IMPALA), tis (truncated), aipo (one-sided) or
    none; see algos/losses.py."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Proximal log-probabilities: recomputed in one pass before the epochs, or interpolated by version without a pass
    (decoupled only)."""
    behaviour_cap: Positive = 5.0
    """Cap of the importance weight in decoupled, tis and aipo."""
    rho_bar: Positive = 1.0
    """vtrace: cap of the weight of each temporal difference."""
    c_bar: Positive = 1.0
    """vtrace: cap of the weight in the trace."""
    max_staleness: NonNegativeInt | None = None
    """Decisions drawn more than this many versions ago are masked; null: none are."""

    # starting from another run's policy (init=)
    critic_warmup: NonNegativeInt = 0
    """Number of first updates in which only the critic (parameters named critic.*) learns."""
    reference_kl_coef: NonNegative = 0.0
    """Weight of KL(policy || policy that training started from) of a decision, or of its scored share as in the policy
    loss: the one denoise step if one is drawn at random."""

    # evaluation
    ema_decay: FractionBelow1 = 0.0
    """Decay of the average of the weights over updates that is evaluated and kept; 0: the weights themselves."""

    def __post_init__(self) -> None:
        if self.min_learning_rate > self.max_learning_rate:
            limit = f"at most max_learning_rate={self.max_learning_rate}"
            raise UserError(f"min_learning_rate: got {self.min_learning_rate}, allowed: {limit}")
        exact = self.correction in ("decoupled", "vtrace") and self.proximal == "recompute"
        if self.reduction != "sum" and not exact:
            needed = "proximal=recompute with correction=decoupled or vtrace"
            raise UserError(f"reduction={self.reduction} needs {needed}, got {self.proximal} and {self.correction}")
        if self.proximal == "interpolate" and self.correction != "decoupled":
            raise UserError(f"proximal=interpolate needs correction=decoupled, got '{self.correction}'")


@config_dataclass
class GRPOConfig(PPOConfig):
    """Options of GRPO: those of PPO, and group_size.

    The options of the critic and of its advantages (gamma, gae_lambda, normalize_advantage, value_*) have no effect.
    """

    group_size: Annotated[int, Field(ge=2)] = 8
    """Envs with the same initial states, whose returns are compared."""
    value_coef: NonNegative = 0.0
    """Must be 0: there is no critic to train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("value_coef", "critic_warmup"):
            if getattr(self, key) != 0:
                raise UserError(f"{key}: got {getattr(self, key)}, allowed: 0, as GRPO has no critic")
        if self.correction == "vtrace":
            raise UserError("correction=vtrace needs a critic, GRPO has none: use decoupled, tis, aipo or none")


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


@config_dataclass
class SFTConfig(SupervisedConfig):
    """Options of SFT, whose samples are chunks."""

    validation_share: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    """Share of the episodes, at least one, that is held out for validation."""
    keep_grounding: NonNegative = 4.0
    """Weight of the loss of positions, in scenes of the simulator, for a policy that algo=grounding trained; 0: off."""
    patience: PositiveInt | None = None
    """Training stops after this many validations without improvement and keeps the best average; null: it never stops
    early and keeps the last average."""


@config_dataclass
class GroundingConfig(SupervisedConfig):
    """Options of Grounding, whose samples are observations with the images of all cameras."""

    batch_size: PositiveInt = 32
    updates: PositiveInt = 14000
    learning_rate: Positive = 1.5e-3
    reuse: Annotated[float, Field(ge=1)] = 2.0
    """Average number of times that an observation is drawn."""
    masks_only: Fraction = 0.3
    """Share of the updates that train masks alone; the later ones train positions too."""
