"""Trainers, one per file. The attribute ``trainer`` of an algorithm's class names its trainer."""

from embodied.algos import ALGORITHMS
from embodied.core.errors import unknown_name
from embodied.session.config import RunConfig
from embodied.session.trainer import Trainer
from embodied.trainers.grounding import GroundingTrainer
from embodied.trainers.imitation import ImitationTrainer
from embodied.trainers.reinforcement import ReinforcementTrainer

__all__ = ["TRAINERS", "trainer_of"]

TRAINERS: dict[str, type[Trainer]] = {
    "reinforcement": ReinforcementTrainer,
    "imitation": ImitationTrainer,
    "grounding": GroundingTrainer,
}


def trainer_of(config: RunConfig) -> type[Trainer]:
    """Return the trainer of the run's algorithm. UserError for a configuration that it does not support."""
    name = ALGORITHMS[config.algo.name].build.trainer
    if name not in TRAINERS:
        raise unknown_name(f"trainer of algo={config.algo.name}", name, TRAINERS)
    trainer = TRAINERS[name]
    trainer.check(config)
    return trainer
