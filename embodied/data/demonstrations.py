"""Demonstrated episodes in memory, and the chunks for imitation.

Episode [L] ... ──► Demonstrations: all frames [F] in order ──► drawn frames [B] ──► chunks [B, H, A]

A chunk starts at every frame, also if fewer than H actions of the episode are left. Then the episode's last action is
repeated as padding. Where a disturbance was executed, the later actions of the chunk answer something that was not yet
observed at its start. A mask marks the actions to imitate: no padding, and none after a disturbance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.types import Obs
from embodied.core.words import word


@dataclass(frozen=True, slots=True)
class Episode:
    """One demonstrated episode of L control steps."""

    state_LS: Tensor
    """Observed state before each step, float32."""
    action_LA: Tensor
    """Action that the demonstrator chose, float32; a disturbance may have been executed instead."""
    reward_L: Tensor
    success_L: Tensor
    """Reward of each step, float32, and whether the task is solved after it, bool."""
    instruction: str
    images: dict[str, Tensor] = field(default_factory=dict)
    """Observed images by camera, uint8 [L, h, w, 3]."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further features by name, [L] or [L, D]."""

    def __len__(self) -> int:
        return len(self.state_LS)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """All F frames of a data set, episode after episode."""

    state_FS: Tensor
    action_FA: Tensor
    """Observed states and chosen actions, float32."""
    episode_F: Tensor
    """Episode of each frame, int64, not decreasing."""
    instruction_F: Tensor
    instructions: tuple[str, ...]
    """All instructions, and each frame's index into them, int64."""
    control_hz: float
    disturbed_F: Tensor | None = None
    """Whether another action than that of ``action_FA`` was executed, bool; None: nowhere."""
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    """Names of the entries of a state and of an action; () if the data set has none."""
    state_units: tuple[str, ...] = ()
    action_units: tuple[str, ...] = ()
    """Their units (``columns.unit_of``); () if the data set does not state them."""
    images: dict[str, Tensor] = field(default_factory=dict)
    """Images of the cameras that were read, uint8 [F, h, w, 3]."""

    def frames(self, episodes: Sequence[int]) -> Tensor:
        """Return all frames of ``episodes``, int64 [W]."""
        return torch.isin(self.episode_F, torch.as_tensor(list(episodes), dtype=torch.int64)).nonzero().squeeze(1)

    @property
    def uninstructed(self) -> bool:
        """Whether no episode has an instruction: all texts are empty."""
        return not any(self.instructions[i] for i in self.instruction_F.unique().tolist())

    def with_instructions(self, instructions: Sequence[str], option: str = "") -> Demonstrations:
        """Return a copy that indexes the ``instructions`` of a task, of which there is one or more.

        A task's only instruction is also that of episodes without any. UserError if the task lacks that of a frame.
        option: key that sets the only instruction of such a task.
        """
        used, place_F = self.instruction_F.unique(return_inverse=True)
        texts = [self.instructions[i] for i in used.tolist()]
        if self.uninstructed and len(instructions) == 1:
            texts = [*instructions] * len(texts)
        unknown = [text for text in texts if text not in instructions]
        if unknown:
            known = f"The task has {len(instructions)}, for instance: {instructions[0]}"
            few = "; ".join(text or "(an empty text)" for text in unknown[:5])
            cure = f". Give {word(option, texts[0])}" if option and len(texts) == 1 and texts[0] else ""
            raise UserError(
                f"the task does not know {len(unknown)} of the data set's instructions: {few}. {known}{cure}"
            )
        index = torch.tensor([instructions.index(text) for text in texts])
        return replace(self, instruction_F=index[place_F], instructions=tuple(instructions))

    def obs(self, rows_B: Tensor | slice) -> Obs:
        """Return the observations of frames ``rows``: ``state`` [B, S], ``instruction`` [B], ``images.<camera>``."""
        images = {f"images.{camera}": frames[rows_B] for camera, frames in self.images.items()}
        return {"state": self.state_FS[rows_B], "instruction": self.instruction_F[rows_B], **images}

    def chunks(self, rows_B: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Return chunks [B, H, A] from frames ``rows`` and their mask [B, H]; the last action pads an episode."""
        last_B = torch.searchsorted(self.episode_F, self.episode_F[rows_B], right=True) - 1
        wanted_BH = rows_B[:, None] + torch.arange(horizon)
        frames_BH, valid_BH = wanted_BH.minimum(last_B[:, None]), wanted_BH <= last_B[:, None]
        if self.disturbed_F is not None:
            disturbed_BH = self.disturbed_F[frames_BH].long()
            valid_BH &= disturbed_BH.cumsum(1) == disturbed_BH  # none before it in the chunk
        return self.action_FA[frames_BH], valid_BH

    def split(self, validation_share: float) -> tuple[list[int], list[int]]:
        """Return the episodes to train on and those to validate on (every n-th). UserError for fewer than 2."""
        episodes = self.episode_F.unique().tolist()
        if len(episodes) < 2:
            raise UserError(f"the data set has {len(episodes)} episode: imitation needs 2 or more, one to validate on")
        stride = max(2, round(1 / validation_share))
        validation = episodes[stride - 1 :: stride] or episodes[-1:]
        return [episode for episode in episodes if episode not in validation], validation
