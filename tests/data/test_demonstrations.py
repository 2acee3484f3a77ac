"""Chunks and splits of demonstrations, by hand."""

from __future__ import annotations

import pytest
import torch

from embodied.core.errors import UserError
from embodied.data import Demonstrations


def data(*lengths: int) -> Demonstrations:
    """State and action of frame f are f and 10 f."""
    frame = torch.arange(sum(lengths), dtype=torch.float32)[:, None]
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Demonstrations(frame, 10 * frame, episode, 20.0)


def test_chunks_never_cross_the_end_of_an_episode() -> None:
    starts = data(4, 2, 3).chunk_starts(3, [0, 1, 2])
    assert starts.tolist() == [0, 1, 6]
    state, action = data(4, 2, 3).chunks(starts, 3)
    assert state[:, 0].tolist() == [0, 1, 6]
    assert action[..., 0].tolist() == [[0, 10, 20], [10, 20, 30], [60, 70, 80]]


def test_only_the_episodes_asked_for() -> None:
    assert data(4, 2, 3).chunk_starts(2, [1, 2]).tolist() == [4, 6, 7]
    assert data(4, 2, 3).chunk_starts(5, [0, 1, 2]).tolist() == []


@pytest.mark.parametrize(("episodes", "share", "validation"), [(20, 0.1, [9, 19]), (3, 0.1, [2]), (4, 0.5, [1, 3])])
def test_split(episodes: int, share: float, validation: list[int]) -> None:
    train, kept = data(*[2] * episodes).split(share)
    assert kept == validation
    assert sorted(train + kept) == list(range(episodes))


def test_one_episode_cannot_be_split() -> None:
    with pytest.raises(UserError, match="has 1 episode: imitation needs 2 or more"):
        data(5).split(0.1)
