"""Environments in a process that was forked after they were built: they are stepped, or say why not."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.process.child import ChildObject
from embodied.envs.views.stepper import Stepper, open_task

WAIT_S = 30.0  # for a forked process that hangs


def forked(work: Callable[[], object]) -> str:
    """Return the error of ``work`` in a forked process, or "done"."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        said = "done"
        try:
            work()
        except UserError as error:
            said = str(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        answered = bool(select.select([pipe], [], [], WAIT_S)[0])
        if not answered:
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return pipe.read() if answered else "it hangs"


def step(stepper: Stepper) -> list[Any]:
    return stepper.step(torch.zeros(2, stepper.spec.action_dim)).obs["state"].tolist()


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("lift", {"num_threads": 2}),
        ("gym/CartPole-v1", {"sim": {"processes": 2}}),
        ("envpool/CartPole-v1", {}),
    ],
)
def test_threads_and_processes_stay_with_the_process_that_built_them(task: str, options: dict[str, Any]) -> None:
    """What a forked process tries changes nothing of its parent's episodes."""
    if task.startswith("envpool/"):
        pytest.importorskip("envpool", reason="needs EnvPool: pip install -c constraints.txt -e '.[envpool]'")
    with closing(open_task(task, 2, **options)) as stepper, closing(open_task(task, 2, **options)) as other:
        for each in (stepper, other):
            each.reset()
            step(each)
        for work in (lambda: step(stepper), stepper.reset):
            assert "was forked" in forked(work)
        if "sim" in options:  # EnvPool's own end crashes the forked process
            forked(stepper.close)
        assert step(stepper) == step(other)


@pytest.mark.parametrize(("task", "options"), [("lift", {"num_threads": 1}), ("gym/CartPole-v1", {})])
def test_environments_in_one_thread_are_copied_by_a_fork(task: str, options: dict[str, Any]) -> None:
    with closing(open_task(task, 2, **options)) as stepper:
        stepper.reset()
        assert forked(lambda: step(stepper)) == "done"
        step(stepper)


def test_a_forked_process_does_not_end_the_children_of_its_parent() -> None:
    with closing(ChildObject("tests.envs.children:Answers")) as child:
        assert "was forked" in forked(lambda: child.call("double", 1))
        forked(child.close)
        assert child.call("double", 1) == 2
