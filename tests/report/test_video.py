"""Films of episodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.core.types import Obs
from embodied.report import video
from embodied.session import factories
from embodied.session.config import compose_run

POST_FROM_TCP = slice(-2, None)  # in the state of detour


class OneRunsIntoThePost(torch.nn.Module):
    """Drives the first robot of detour into the post, which ends its episode; the others stand still."""

    execute = 4
    plan_noise_shape = (4, 4)

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        action_NHA = torch.zeros(len(obs["state"]), *self.plan_noise_shape)
        action_NHA[0, :, :2] = torch.nn.functional.normalize(obs["state"][0, POST_FROM_TCP], dim=0)
        return action_NHA


def test_in_a_grid_an_episode_that_has_ended_shows_its_last_image(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[video.Pixels] = []
    numbers = count(1)

    @contextmanager
    def kept(path: Path, fps: float) -> Iterator[object]:
        yield frames.append

    def render() -> video.Pixels:
        return np.full((2, 2, 2, 3), next(numbers), np.uint8)

    monkeypatch.setattr(video, "open_mp4", kept)
    config = compose_run({"task": "detour", "device": "cpu"})
    with closing(factories.make_acting_env(config, 2, 1)) as env:
        plans = factories.evaluation_plans(env.spec, 2, 0)
        assert video.record(env, render, OneRunsIntoThePost(), plans, [Path("grid.mp4")]) == [False, False]
        limit = env.spec.max_episode_steps
    shown = np.array([frame[0, [0, 2], 0] for frame in frames])
    ended = len(np.unique(shown[:, 0]))
    assert 2 < ended < limit
    assert np.unique(shown[:, 1]).size == len(frames) > ended
    assert (shown[ended:, 0] == shown[ended - 1, 0]).all()
