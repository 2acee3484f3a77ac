"""Grounding: a fresh policy learns what labelled images show, and where the things are that an instruction names.

A simulator gives the targets, for any number of scenes: the words that describe a pixel, the role of a pixel in the
instruction, and the positions of the object and the place that the instruction names. Imitation and reinforcement
learning then start from a policy that relates words to images. π0 starts from a model of captioned images instead.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from embodied.algos.registry import ALGORITHMS
from embodied.algos.supervised import Supervised, SupervisedConfig
from embodied.core.errors import UserError
from embodied.core.options import Fraction, Positive, PositiveInt, config_dataclass
from embodied.core.policy import Policy
from embodied.core.types import Obs


@config_dataclass
class GroundingConfig(SupervisedConfig):
    """Options of Grounding, whose samples are observations with the images of all cameras."""

    batch_size: PositiveInt = 32
    """Observations of an update."""
    updates: PositiveInt = 14000
    """Largest number of updates."""
    learning_rate: Positive = 1.5e-3
    """Highest learning rate."""
    reuse: Annotated[float, Field(ge=1)] = 2.0
    """Average number of times that an observation is drawn."""
    masks_only: Fraction = 0.3
    """Share of the updates that train masks alone; the later ones train positions too."""


@ALGORITHMS.register("grounding", config=GroundingConfig)
class Grounding(Supervised):
    """Train ``policy.grounding_loss`` with AdamW: first on masks alone, then on positions too."""

    trainer: ClassVar[str] = "grounding"
    config: GroundingConfig

    def __init__(self, policy: Policy, config: GroundingConfig, *, seed: int, device: torch.device) -> None:
        if not policy.roles:
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
