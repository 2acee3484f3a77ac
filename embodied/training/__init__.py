"""Trainers, one a file. The class of an algorithm says by ``trainer`` which one it belongs to."""

from __future__ import annotations

from algos import ALGORITHMS
from embodied.core.errors import unknown_name
from embodied.run.config import RunConfig
from embodied.run.trainer import Trainer
from embodied.training.grounding import GroundingTrainer
from embodied.training.imitation import ImitationTrainer
from embodied.training.reinforcement import ReinforcementTrainer

__all__ = ["TRAINERS", "trainer_of"]

TRAINERS: dict[str, type[Trainer]] = {
    "reinforcement": ReinforcementTrainer,
    "imitation": ImitationTrainer,
    "grounding": GroundingTrainer,
}


def trainer_of(config: RunConfig) -> type[Trainer]:
    """The trainer of the run's algorithm. UserError unless it takes the configuration; nothing is built."""
    name = ALGORITHMS[config.algo["name"]].build.trainer
    if name not in TRAINERS:
        raise unknown_name(f"trainer of algo={config.algo['name']}", name, TRAINERS)
    trainer = TRAINERS[name]
    trainer.check(config)
    return trainer
