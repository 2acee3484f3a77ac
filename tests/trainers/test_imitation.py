"""Imitation from a data set on disk to a plan: every frame of an episode is learned from."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.spec import EnvSpec
from embodied.data import Episode, write
from embodied.session import factories
from embodied.session.config import compose_run
from embodied.trainers.imitation import ImitationTrainer
from tests.policies import vla_builders

LENGTH = 6
TINY_VLA = {
    "task": "tabletop", "policy": "vla_tiny", "policy.image_size": 16, "policy.cameras": ["front"],
    "policy.model": vla_builders.MODEL | {"max_state_dim": 64, "max_action_dim": 8},
}  # fmt: skip


def sorted_at_the_end(spec: EnvSpec, sign: int, pixels: int = 16) -> Episode:
    """An episode whose actions are 0, but for the last one: it goes where entry 1 of the state says."""
    state = torch.zeros(LENGTH, spec.state_dim)
    state[:, 0], state[:, 1] = torch.arange(LENGTH), sign
    action = torch.zeros(LENGTH, spec.action_dim)
    action[-1] = 0.8 * sign
    images = {camera.name: torch.zeros(LENGTH, pixels, pixels, 3, dtype=torch.uint8) for camera in spec.cameras}
    text = spec.texts[0] if spec.texts else "sort"
    return Episode(state, action, torch.zeros(LENGTH), torch.ones(LENGTH, dtype=torch.bool), text, images)


def last_actions(trainer: ImitationTrainer) -> tuple[Tensor, Tensor]:
    """Return the demonstrated and the planned action of the last frame of every episode, [episodes] each."""
    last = torch.arange(LENGTH - 1, len(trainer.data.action_FA), LENGTH)
    obs: dict[str, Tensor] = {key: value[last] for key, value in trainer.data.obs(slice(None)).items()}
    horizon, action_dim = trainer.policy.horizon, trainer.data.action_FA.shape[1]
    if trainer.config.max_delay:
        delays = {"delay": torch.zeros(len(last), dtype=torch.int64)}
        obs |= delays | {"prefix": torch.zeros(len(last), trainer.config.max_delay, action_dim)}
    plan = trainer.policy.plan(obs)
    assert plan.shape == (len(last), horizon, action_dim)
    return trainer.data.action_FA[last, 0], plan[:, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "flow", "policy.horizon": 1, "policy.execute": 1},
        {"policy": "flow", "policy.horizon": 4},
        {"policy": "flow", "policy.horizon": 4, "policy.execute": 2, "policy.max_delay": 2},
        {"policy": "flow", "policy.horizon": 8},
        {"policy": "gaussian", "policy.horizon": 1, "policy.execute": 1},
        {"policy": "gaussian", "policy.horizon": 4},
        {**TINY_VLA, "policy.horizon": 4, "policy.execute": 4},
    ],
    ids=["flow-1", "flow-4", "flow-delay", "flow longer than an episode", "gaussian-1", "gaussian-4", "vla-4"],
)
def test_the_last_action_of_an_episode_is_learned_whatever_the_horizon(options: dict[str, Any], tmp_path: Path) -> None:
    config = {"task": "reach", "algo": "sft", "device": "cpu", "algo.batch_size": 64, "algo.learning_rate": 5e-3}
    updates = 100 if options["policy"] == "vla_tiny" else 250
    config |= {"algo.updates": updates, "algo.warmup": 5, "algo.ema_decay": 0.9, "data": str(tmp_path / "set")}
    run = compose_run(config | options)
    spec = factories.make_spec(run)
    write(tmp_path / "set", [sorted_at_the_end(spec, sign) for sign in (1, -1, -1, 1, 1, -1)], spec)
    with ImitationTrainer(run, tmp_path / "run", new=True) as trainer:
        for _ in range(updates):
            trainer.update()
        trainer.finish()
        demonstrated, planned = last_actions(trainer)
    torch.testing.assert_close(planned, demonstrated, atol=0.4, rtol=0)


@pytest.mark.parametrize("patience", [None, 2])
def test_the_last_average_is_kept_or_with_patience_the_best_one(patience: int | None, tmp_path: Path) -> None:
    words = {"task": "reach", "policy": "gaussian", "algo": "sft", "device": "cpu", "algo.batch_size": 8}
    words |= {"algo.updates": 12, "algo.validate_every": 2, "algo.patience": patience, "data": str(tmp_path / "set")}
    run = compose_run(words)
    spec = factories.make_spec(run)
    write(tmp_path / "set", [sorted_at_the_end(spec, sign) for sign in (1, -1, 1)], spec)
    losses = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    averages, states = [], []
    with ImitationTrainer(run, tmp_path / "run", new=True) as trainer:
        trainer.validate = lambda: (next(losses), {})  # type: ignore[method-assign]
        for _ in trainer.iterations(threading.Event(), math.inf):
            averages.append(trainer.algorithm.weights())
            states.append(trainer.state_dict())
        trainer.finish()
        finished = trainer.policy.state_dict()
    assert len(averages) == (6 if patience is None else 4)
    best = averages[-1 if patience is None else 1]
    for name, weight in best.items():
        assert torch.equal(weight, finished[name])
        assert torch.equal(weight, states[-1]["policy"][name])
    with ImitationTrainer(run, tmp_path / "run", new=True) as resumed:
        resumed.load_state_dict(states[-1])
        again = resumed.state_dict()
    assert again["kept"] == states[-1]["kept"]
    assert all(torch.equal(weight, again["policy"][name]) for name, weight in best.items())


def announced(path: Path, policy: str = "gaussian", cameras: Sequence[str] = ()) -> list[str]:
    """The lines before the imitation of a data set of another simulator's task."""
    words = {"task": "gym/tests.envs.toy_gym:Nested-v0", "algo": "sft", "device": "cpu", "policy": policy}
    words |= {"policy.cameras": [*cameras], "policy.image_size": 36} if policy == "gaussian" else {}
    with ImitationTrainer(compose_run(words | {"data": str(path)}), path.parent / "run", new=True) as trainer:
        return trainer.announcement().splitlines()


def test_cameras_that_the_policy_could_observe_are_named(tmp_path: Path) -> None:
    task = {"task": "gym/tests.envs.toy_gym:Nested-v0", "policy": "gaussian", "policy.image_size": 36}
    spec = factories.make_spec(compose_run(task | {"policy.cameras": ["front"]}))
    path = tmp_path / "set"
    write(path, [sorted_at_the_end(spec, sign, 36) for sign in (1, -1)], spec)
    line = "camera front is not used: policy.cameras=[front] uses it"
    assert [one for one in announced(path) if "not used" in one] == [line]
    assert not [one for one in announced(path, cameras=["front"]) if "not used" in one]
    assert not [one for one in announced(path, policy="flow") if "not used" in one], "it has no cameras"
    info = path / "meta" / "info.json"
    info.write_text(info.read_text().replace("images.front", "images.above"))
    line = "cameras front, gray are not used: policy.cameras=[front,gray] uses them"
    assert [one for one in announced(path) if "not used" in one] == [line], "the names of the task's"
