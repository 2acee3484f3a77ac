"""Group-relative policy optimisation: PPO without a critic, whose baseline is the mean return of a group."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from embodied.algos import returns
from embodied.algos.ppo import PPO
from embodied.algos.ppo_config import PPOConfig
from embodied.algos.registry import ALGORITHMS
from embodied.core.errors import UserError
from embodied.core.options import NonNegative, config_dataclass
from embodied.core.types import Fragment


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


@ALGORITHMS.register("grpo", config=GRPOConfig)
class GRPO(PPO):
    """PPO with the same advantage for all decisions of an episode: the episode's return, standardised in its group.

    Needs fragments of whole episodes, whose envs form groups of ``group_size`` neighbours with the same initial states;
    embodied.session.factories arranges both. The critic is neither trained nor used.
    """

    config: GRPOConfig

    def estimate(self, fragment: Fragment, log_rho_TN: Tensor, valid_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the advantages in the groups; mask groups and decisions that cannot be compared."""
        advantage_N, compared_TN = returns.group_relative(fragment, self.config.group_size)
        return advantage_N.expand_as(log_rho_TN), fragment.value_TN, valid_TN & compared_TN
