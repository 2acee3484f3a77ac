"""Group-relative policy optimisation: PPO without a critic, whose baseline is the mean return of a group."""

from torch import Tensor

from embodied.algos import returns
from embodied.algos.config import GRPOConfig
from embodied.algos.ppo import PPO
from embodied.core.types import Fragment


class GRPO(PPO):
    """PPO with the same advantage for all decisions of an episode: the episode's return, standardised in its group.

    Needs fragments of whole episodes, whose envs form groups of ``group_size`` neighbours with the same initial states;
    embodied.session.factories arranges both. The critic is neither trained nor used.
    """

    config: GRPOConfig

    recordable = True

    def estimate(self, fragment: Fragment, log_rho_TN: Tensor, valid_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the advantages in the groups; mask groups and decisions that cannot be compared."""
        advantage_N, compared_TN = returns.group_relative(fragment, self.config.group_size)
        return advantage_N.expand_as(log_rho_TN), fragment.value_TN, valid_TN & compared_TN
