"""Instructions: which of them episodes get, and what a task's words must be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.spec import Instruction
from embodied.envs.episodes.sampler import InstructionDraw
from embodied.envs.episodes.seeding import EpisodeRng
from embodied.envs.tasks.config import default_words
from tests.envs.helpers import pool, restart

# three goals, one of them said in two ways, another held out in one of its two phrases
SOME = (
    Instruction("a1", "a"),
    Instruction("a2", "a"),
    Instruction("b1", "b"),
    Instruction("b2", "b", "held_out"),
    Instruction("c1", "c", "held_out"),
)


def drawn(splits: tuple[str, ...] | None, seeds: int = 1200, episode: int = 0) -> Counter[str]:
    rng = EpisodeRng(np.arange(seeds), np.full(seeds, episode))
    return Counter(SOME[i].text for i in InstructionDraw(SOME, splits)(rng))


def test_splits_and_goals_come_in_turn_and_texts_at_random() -> None:
    count = drawn(None)
    assert count["a1"] + count["a2"] == count["b1"] == count["b2"] == count["c1"] == 300
    assert min(count["a1"], count["a2"]) > 100
    count = drawn(("train",), episode=7)
    assert set(count) == {"a1", "a2", "b1"}
    assert count["b1"] == 600
    assert set(drawn(("held_out",))) == {"b2", "c1"}


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(UserError, match=r"unknown split of the instructions 'heldout'\. Did you mean 'held_out'"):
        InstructionDraw(SOME, ("heldout",))
    with pytest.raises(UserError, match="unknown split of the instructions 'held_out'"):
        pool("lift", 1, splits=("held_out",))


@pytest.mark.parametrize("task", ["reach", "stack"])
def test_a_task_without_a_choice_is_always_told_the_same(task: str) -> None:
    env = pool(task, 3)
    assert env.spec.texts == env.spec.goals == (env.task.instruction,)
    assert env.spec.splits == ("train",)
    assert env.task.instruction_N.tolist() == [0, 0, 0]


def test_held_out_goals_are_new_in_two_ways() -> None:
    """Every word is trained on; some held-out objects are known with the other tray, others are never asked for."""
    words = default_words()
    assert len(words.goals) == 24
    assert len(words.held_out) == 6
    trained = [goal for goal in words.goals if goal not in words.held_out]
    for place, known in enumerate((words.colors, words.shapes, words.trays)):
        assert {goal[place] for goal in trained} == set(known)
    seen = {goal[:2] for goal in trained}
    assert {goal[:2] in seen for goal in words.held_out} == {True, False}
    texts = [instruction.text for instruction in words.instructions]
    assert len(texts) == len(set(texts)) == 24 * len(words.templates)
    i = texts.index("put the red cube into the left tray")
    assert words.instructions[i].goal == "red cube -> left tray"
    assert words.instructions[i].split == "held_out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": [["red", "cone", "left"]]}, r"unknown shape in held_out\[0\] 'cone'"),
        ({"held_out": [["rde", "cube", "left"]]}, r"unknown color in held_out\[0\] 'rde'. Did you mean 'red'"),
        ({"held_out": [["red", "cube", "left"]] * 2}, "held_out names a goal twice"),
        ({"templates": ["take the {color} {shape}"]}, r"templates\[0\]: .* lacks \{tray\}"),
        ({"templates": ["{color} {shape} {tray} {size}"]}, r"unknown placeholder in templates\[0\] 'size'"),
        ({"templates": ["{color} {shape} {tray}"] * 2}, "' is said twice; every text must be there once"),
        ({"templates": ["{color} {shape} {tray"]}, r"templates\[0\]: cannot read"),
        ({"templates": []}, r"words.templates: got \[\], allowed: 1 or more entries"),
        ({"shapes": {"cube": {"kind": "box", "size_m": [0.02] * 3}}, "held_out": []}, "shapes: got .*2 or more"),
        ({"colors": {"red": [1, 0, 0]}, "held_out": []}, "words.colors: got .*2 or more entries"),
        ({"colors": {"red": [1, 0, 0], "blue": [0, 0, 255]}, "held_out": []}, r"blue\[2\]: got 255, .* at most 1"),
        ({"shapes": {"a": {"kind": "cone", "size_m": [0.02]}}}, "shapes.a.kind: got 'cone', allowed: 'box'"),
        ({"shapes": {"a": {"kind": "sphere", "size_m": [0.02, 1]}}}, r"size_m: got \[0.02, 1.0\], a sphere has 1"),
        ({"shapes": {"a": {"kind": "sphere", "size_m": [0.05]}, "b": {"kind": "sphere", "size_m": [0.02]}},
          "held_out": []}, r"words.shapes.a: half as wide as 0.05 m, allowed: up to 0.03"),
    ],
)  # fmt: skip
def test_wrong_words_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pool("tabletop", 1, config={"words": words_with(**changes)})


def words_with(**changes: Any) -> dict[str, Any]:
    words = default_words()
    return {name: getattr(words, name) for name in ("shapes", "colors", "trays", "templates", "held_out")} | changes


def test_new_words_are_data() -> None:
    """A colour, a shape, a tray and a way to say it that no code knows."""
    words = default_words()
    env = pool("tabletop", 24, config={"words": words_with(
        shapes={**words.shapes, "brick": {"kind": "box", "size_m": [0.03, 0.02, 0.015]}},
        colors={"purple": [0.5, 0.1, 0.6], **words.colors},
        trays={**words.trays, "far": [0.7, 0.285]},
        templates=[*words.templates, "{tray} tray: {color} {shape}"],
    )})  # fmt: skip
    assert "far tray: purple brick" in env.spec.texts
    restart(env, 2 * env.spec.goals.index("purple brick -> far tray") // len(words.templates))
    for _ in range(env.spec.max_episode_steps):
        step = env.step(env.task.expert())
    assert step.episodes.success_at_end_M.double().mean() > 0.8
    assert torch.unique(env.task.shape_NB).tolist() == [0, 1, 2, 3]
