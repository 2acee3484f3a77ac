"""Trainers: every algorithm has one, and each says what it needs before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embodied.algos import ALGORITHMS
from embodied.core.errors import UserError
from embodied.envs.tasks import base as tasks
from embodied.policies.vla.grounding import ROLE_NAMES
from embodied.session import factories
from embodied.session.config import compose_run
from embodied.trainers import TRAINERS, trainer_of
from embodied.trainers.grounding import GroundingTrainer

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


def test_task_and_policy_must_agree_on_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tasks.ROLE_NAMES == ROLE_NAMES
    config = compose_run({**VLA, "algo": "grounding", "num_envs": 2, "device": "cpu"})
    policy = factories.make_policy(config, factories.make_spec(config))
    monkeypatch.setattr(type(policy), "roles", ("none", "tool"))
    with pytest.raises(UserError, match="policy=vla_tiny learns the roles none, tool; task=tabletop labels none, obj"):
        GroundingTrainer(config, tmp_path / "run", new=True)
