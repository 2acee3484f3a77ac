"""Imitation: supervised fine-tuning of a policy on demonstrated chunks, with an average of its weights."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from embodied.algos.registry import ALGORITHMS
from embodied.algos.supervised import Supervised, SupervisedConfig
from embodied.core.errors import UserError
from embodied.core.options import NonNegative, PositiveInt, config_dataclass
from embodied.core.policy import Policy
from embodied.core.types import Obs

VALIDATION_DRAWS = 8  # draws of noise and time per validation chunk, the same ones in every validation


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


@ALGORITHMS.register("sft", config=SFTConfig)
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

        valid_BH: which actions were demonstrated (``Policy.imitation_loss``). scenes: observations with
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
