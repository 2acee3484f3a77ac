"""Chunks and splits of demonstrations, by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import torch

from embodied.core.config import parse_overrides
from embodied.core.errors import UserError
from embodied.data import Demonstrations


def data(*lengths: int) -> Demonstrations:
    """State and action of frame f are f and 10 f."""
    frame = torch.arange(sum(lengths), dtype=torch.float32)[:, None]
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Demonstrations(frame, 10 * frame, episode, episode % 2, ("a", "b"), 20.0)


def test_a_chunk_starts_at_every_frame_and_never_crosses_the_end_of_an_episode() -> None:
    frames = data(4, 2, 3).frames([0, 1, 2])
    assert frames.tolist() == list(range(9))
    obs, (action, valid) = data(4, 2, 3).obs(frames), data(4, 2, 3).chunks(frames, 3)
    assert obs["state"][:, 0].tolist() == frames.tolist()
    assert obs["instruction"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert action[..., 0].tolist() == [
        [0, 10, 20], [10, 20, 30], [20, 30, 30], [30, 30, 30], [40, 50, 50], [50, 50, 50], [60, 70, 80], [70, 80, 80],
        [80, 80, 80],
    ]  # fmt: skip
    assert valid.sum(1).tolist() == [3, 3, 2, 1, 2, 1, 3, 2, 1]
    assert (valid == (torch.arange(3) < valid.sum(1, keepdim=True))).all()


def test_what_answers_a_disturbance_within_the_chunk_is_not_imitated() -> None:
    disturbed = torch.tensor([False, True, True, False, False, True])
    _, valid = replace(data(4, 2), disturbed_F=disturbed).chunks(torch.arange(6), 3)
    assert valid.tolist() == [
        [True, True, False], [True, False, False], [True, False, False], [True, False, False], [True, True, False],
        [True, False, False],
    ]  # fmt: skip


def test_observations_have_pictures_and_instructions_of_the_same_frames() -> None:
    frames = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 2, 2, 3)
    obs = replace(data(3, 3), images={"front": frames}).obs(torch.tensor([4, 1]))
    assert set(obs) == {"state", "instruction", "images.front"}
    assert obs["images.front"][:, 0, 0, 0].tolist() == obs["state"][:, 0].tolist() == [4, 1]
    assert obs["instruction"].tolist() == [1, 0]


def test_the_option_that_makes_the_task_know_an_instruction_is_given() -> None:
    with pytest.raises(UserError, match=r"for instance: x\. Give task\.instruction=a$"):
        data(2).with_instructions(["x"], "task.instruction")
    told = replace(data(2), instructions=("it's here", "b"))
    with pytest.raises(UserError) as caught:
        told.with_instructions(["x"], "task.instruction")
    words = shlex.split(str(caught.value).partition(". Give ")[2])
    assert parse_overrides(words) == {"task.instruction": "it's here"}
    with pytest.raises(UserError, match=r"for instance: x$"):
        data(2, 2).with_instructions(["x"], "task.instruction")  # one option cannot name two


def test_episodes_without_an_instruction_get_that_of_a_task_with_one() -> None:
    empty = replace(data(2, 2), instructions=("", ""))
    found = empty.with_instructions(["x"])
    assert (found.instructions, found.instruction_F.tolist()) == (("x",), [0, 0, 0, 0])
    with pytest.raises(UserError, match=r"instructions: \(an empty text\)\. The task has 2"):
        replace(data(2), instructions=("", "b")).with_instructions(["x", "y"])


def test_instructions_are_found_by_their_text() -> None:
    data_set = data(2, 2, 2).with_instructions(["c", "b", "a"])
    assert data_set.instruction_F.tolist() == [2, 2, 1, 1, 2, 2]
    assert data_set.instructions == ("c", "b", "a")
    with pytest.raises(
        UserError, match=r"does not know 1 of the data set's instructions: b\. The task has 2, for instance"
    ):
        data(2, 2).with_instructions(["x", "a"])
    assert data(3).with_instructions(["a"]).instruction_F.tolist() == [0, 0, 0], "no frame has instruction b"


def test_only_the_episodes_asked_for() -> None:
    assert data(4, 2, 3).frames([1, 2]).tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("episodes", "share", "validation"), [(20, 0.1, [9, 19]), (3, 0.1, [2]), (4, 0.5, [1, 3])])
def test_split(episodes: int, share: float, validation: list[int]) -> None:
    train, kept = data(*[2] * episodes).split(share)
    assert kept == validation
    assert sorted(train + kept) == list(range(episodes))


def test_one_episode_cannot_be_split() -> None:
    with pytest.raises(UserError, match="has 1 episode: imitation needs 2 or more"):
        data(5).split(0.1)
