"""Episodes in memory, and the chunks that imitation learns from.

Episode [L] ... ──► Demonstrations: all frames [F] in order ──► starts [W] ──► chunks [B, H, A] at some of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from embodied.core.errors import UserError
from embodied.core.types import Obs


@dataclass(frozen=True, slots=True)
class Episode:
    """L control steps: what was observed, and what the demonstrator did then.

    action_LA is what it wanted; what the robot executed may have had noise on it. success_L: solved after the step.
    """

    state_LS: Tensor
    action_LA: Tensor
    reward_L: Tensor
    success_L: Tensor
    instruction: str
    images: dict[str, Tensor] = field(default_factory=dict)  # by camera, uint8 [L, h, w, 3]

    def __len__(self) -> int:
        return len(self.state_LS)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """All frames of a data set, episode after episode: state_FS, action_FA float32, episode_F int64 (not decreasing),
    instruction_F int64 (index into instructions).

    control_hz: frames per second. state_names, action_names: what the data set calls the entries, () if it does not.
    images: those that were asked for, by camera, uint8 [F, h, w, 3].
    """

    state_FS: Tensor
    action_FA: Tensor
    episode_F: Tensor
    instruction_F: Tensor
    instructions: tuple[str, ...]
    control_hz: float
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    images: dict[str, Tensor] = field(default_factory=dict)

    def chunk_starts(self, horizon: int, episodes: Sequence[int]) -> Tensor:
        """Frames of ``episodes`` from which ``horizon`` actions follow in the same episode, int64 [W]."""
        frames = torch.arange(max(0, len(self.episode_F) - horizon + 1))
        inside = self.episode_F[frames] == self.episode_F[frames + horizon - 1]
        chosen = torch.isin(self.episode_F[frames], torch.as_tensor(list(episodes), dtype=torch.int64))
        return frames[inside & chosen]

    def with_instructions(self, instructions: Sequence[str]) -> Demonstrations:
        """Index the texts in ``instructions``, those of a task, instead. UserError for a text that is not there."""
        unknown = [text for text in self.instructions if text not in instructions]
        if unknown:
            listed = "; ".join(unknown[:5]) + ("; ..." if len(unknown) > 5 else "")
            raise UserError(
                f"the task does not know {len(unknown)} of the data set's instructions: {listed}. "
                f"The task has {len(instructions)}, for instance: {instructions[0]}"
            )
        place = torch.tensor([list(instructions).index(text) for text in self.instructions])
        return replace(self, instruction_F=place[self.instruction_F], instructions=tuple(instructions))

    def obs(self, rows_B: Tensor | slice) -> Obs:
        """What was observed in frames ``rows``: ``state`` [B, S], ``instruction`` [B], ``images.<camera>``."""
        pictures = {f"images.{camera}": frames[rows_B] for camera, frames in self.images.items()}
        return {"state": self.state_FS[rows_B], "instruction": self.instruction_F[rows_B], **pictures}

    def actions(self, starts_B: Tensor, horizon: int) -> Tensor:
        """The ``horizon`` actions from frames ``starts`` on, [B, H, A]."""
        return self.action_FA[starts_B[:, None] + torch.arange(horizon)]

    def split(self, validation_share: float) -> tuple[list[int], list[int]]:
        """Episodes to train on, and to validate on (every n-th, at least one). UserError if there is but one."""
        episodes = self.episode_F.unique().tolist()
        if len(episodes) < 2:
            raise UserError(
                f"the data set has {len(episodes)} episode: imitation needs 2 or more, one of them to validate on"
            )
        stride = max(2, round(1 / validation_share))
        validation = episodes[stride - 1 :: stride] or episodes[-1:]
        return [episode for episode in episodes if episode not in validation], validation
