"""Options that policies share."""

from typing import Annotated

from embodied.core.errors import UserError
from embodied.core.options import PositiveInt, Widths, config_dataclass, one_of
from embodied.core.spec import CameraSpec
from embodied.policies.networks import ACTIVATIONS


@config_dataclass
class ActorCriticConfig:
    """Options that all policies share."""

    horizon: PositiveInt = 4
    """H, planned actions of a chunk. A flow policy with E < H imitates worse (docs/flow_rl.md)."""
    execute: PositiveInt = 4
    """E, executed actions of a chunk, at most horizon."""
    critic_hidden: Widths = (128, 128)
    """Widths of the critic's hidden layers."""
    activation: Annotated[str, one_of(ACTIVATIONS)] = "relu"
    """Activation of the hidden layers."""

    def __post_init__(self) -> None:
        if self.execute > self.horizon:
            raise UserError(f"execute: got {self.execute}, allowed: at most horizon={self.horizon}")

    @property
    def observed_cameras(self) -> tuple[CameraSpec, ...]:
        """Cameras that the policy needs; none for a policy that observes a state vector alone."""
        return ()


@config_dataclass
class CameraConfig(ActorCriticConfig):
    """Options of policies with cameras."""

    cameras: tuple[str, ...] = ()
    """Cameras whose images the policy observes, in this order; none: the state vector alone."""
    image_size: PositiveInt = 64
    """Pixels of the square images."""

    @property
    def observed_cameras(self) -> tuple[CameraSpec, ...]:
        return tuple(CameraSpec.square(name, self.image_size) for name in self.cameras)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.cameras)) < len(self.cameras):
            raise UserError(f"cameras: got {list(self.cameras)}, allowed: each camera once")
