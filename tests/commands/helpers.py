"""Commands run in this process, on settings small enough for a second or two."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied import collect, tasks, train
from embodied import eval as eval_command
from embodied.algos.supervised import SFT
from embodied.runtime import checkpoint
from embodied.session import session

SMALL = [
    "task=reach", "policy=gaussian", "runtime=sync", "num_envs=8", "runtime.decisions=8", "device=cpu",
    "policy.horizon=1", "policy.execute=1",
    "policy.actor_hidden=[16]", "policy.critic_hidden=[16]", "algo.epochs=1", "algo.num_minibatches=1",
    "runtime.sim_threads=1", "runtime.actor_threads=1", "runtime.learner_threads=1",
    "eval_episodes=4", "runtime.eval_every=5", "runtime.eval_episodes=3",
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code and streams."""

    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        return json.loads(self.stdout.splitlines()[-1])


def run(main: Callable[[list[str]], int], words: list[str]) -> Outcome:
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = main(words)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def run_train(*words: str) -> Outcome:
    return run(train.main, list(words))


def run_eval(*words: str) -> Outcome:
    return run(eval_command.main, list(words))


def run_collect(*words: str) -> Outcome:
    return run(collect.main, list(words))


def run_tasks(*words: str) -> Outcome:
    return run(tasks.main, list(words))


@contextmanager
def imitation_ends_after(updates: int, error: Exception | None = None) -> Iterator[None]:
    """Imitation gets a signal to stop after so many updates, or raises an error."""
    stop, update = threading.Event(), SFT.update

    def ending(self: SFT, *args: Any) -> float:
        loss = update(self, *args)
        if self.updates == updates:
            if error is not None:
                raise error
            stop.set()
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFT, "update", ending)
        patch.setattr(session, "stop_on_signals", lambda: nullcontext(stop))
        yield


def assert_ends_alike(run: Path, whole: Path) -> None:
    """The last checkpoints of two runs of imitation hold the same."""
    ours, expected = (checkpoint.load_latest(path).state for path in (run, whole))  # type: ignore[union-attr]
    assert ours["kept"] == expected["kept"]
    for key, value in expected["policy"].items():
        assert torch.equal(ours["policy"][key], value), key


def checkpoint_of(run_dir: Path, env_steps: int) -> Path:
    """The run's checkpoint after so many steps; KeyError if there is none."""
    return {int(path.name[5:]): path for path in (run_dir / "checkpoints").glob("step_*")}[env_steps]
