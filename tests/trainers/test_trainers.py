"""Trainers: every algorithm has one, and each says what it needs before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from embodied.algos import ALGORITHMS
from embodied.core.errors import UserError
from embodied.session.config import compose_run
from embodied.trainers import TRAINERS, trainer_of

VLA = {"task": "tabletop", "policy": "vla_tiny", "policy.image_size": 16}


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_algorithm_belongs_to_a_trainer(name: str) -> None:
    assert ALGORITHMS[name].build.trainer in TRAINERS
    assert isinstance(ALGORITHMS[name].build.explores, bool)


def test_an_algorithm_of_an_unknown_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALGORITHMS["ppo"].build, "trainer", "reinforcment")
    with pytest.raises(UserError, match=r"unknown trainer of algo=ppo 'reinforcment'\. Did you mean 'reinforcement'"):
        trainer_of(compose_run({"task": "reach"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algo": "sft"}, "algo=sft learns from demonstrations: data=<directory of embodied.collect> is missing"),
        ({"algo": "ppo", "data": "x"}, "data=x is for algo=sft; ppo learns from its own experience"),
        ({"algo": "grounding", "data": "x"}, "data=x is for algo=sft; grounding learns from its own experience"),
        ({"algo": "sft", "data": "x", "stop_at_success": 0.9}, "stop_at_success is for reinforcement learning"),
        ({"algo": "grounding", "task": "pick_place"}, "policy=flow has no cameras, and pick_place labels nothing"),
        ({"algo": "grounding", "task": "tabletop"}, "a task with masks: policy=flow has no cameras$"),
        ({**VLA, "algo": "grounding", "task": "pick_place"}, "a task with masks: pick_place labels nothing that they"),
        ({**VLA, "algo": "grounding", "policy.freeze": ["vision"]}, "policy.freeze must be .*, got .'vision'"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer_of(compose_run({"task": "reach", **options}))
