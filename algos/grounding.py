"""Grounding: a fresh policy that sees and reads learns what pictures show, and where that is which a task names.

Its targets are what a simulator knows of as many scenes as one likes: which words describe a part of the picture, which
part is the named object or place, and where these are. Imitation and reinforcement learning then start from eyes and
words that know each other, as π0 starts from a model of captioned pictures.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from algos.registry import ALGORITHMS
from algos.supervised import Supervised, SupervisedConfig
from embodied.core.errors import UserError
from embodied.core.options import Count, Positive, Share, config_dataclass
from embodied.core.protocols import Groundable, Policy
from embodied.core.types import Obs


@config_dataclass
class GroundingConfig(SupervisedConfig):
    """Options of Grounding, whose samples are scenes, seen by every camera."""

    batch_size: Count = 32
    updates: Count = 14000
    learning_rate: Positive = 1.5e-3
    reuse: Annotated[float, Field(ge=1)] = 2.0
    """How often a scene is drawn, on average."""
    masks_only: Share = 0.3
    """Share of the updates before the loss of positions begins."""


@ALGORITHMS.register("grounding", config=GroundingConfig)
class Grounding(Supervised):
    """AdamW on ``policy.grounding_loss``: first of masks alone, then also of where things are."""

    config: GroundingConfig

    def __init__(self, policy: Policy, config: GroundingConfig, *, seed: int, device: torch.device) -> None:
        if not isinstance(policy, Groundable) or not isinstance(policy, nn.Module):
            raise UserError(f"algo=grounding needs a policy that sees and reads, {type(policy).__name__} does not")
        super().__init__(policy, config, seed=seed, device=device)
        self.learner: Groundable = policy

    def update(self, obs: Obs) -> float:
        """One step on observations with masks; its loss. FloatingPointError if that is not finite."""
        return self.descend(self.learner.grounding_loss(self.to_device(obs), self.asks_where))

    @property
    def asks_where(self) -> bool:
        return self.updates >= self.config.masks_only * self.config.updates

    @torch.no_grad()
    def validate(self, obs: Obs) -> float:
        """The loss of the average weights in what is being learned now."""
        assert isinstance(self.average, Groundable)
        return float(self.average.grounding_loss(self.to_device(obs), self.asks_where))

    @torch.no_grad()
    def find(self, obs: Obs) -> dict[str, float]:
        """How often the average weights find the named object, by camera that shows it (``Groundable.found``)."""
        assert isinstance(self.average, Groundable)
        found = self.average.found(self.to_device(obs))
        return {camera: float(hit_M.float().mean()) for camera, hit_M in found.items() if len(hit_M)}

    @torch.no_grad()
    def locate(self, obs: Obs) -> Tensor:
        """Where the average weights say that the named object and place are (``Groundable.locate``), on the CPU."""
        assert isinstance(self.average, Groundable)
        return self.average.locate(self.to_device(obs)).cpu()
