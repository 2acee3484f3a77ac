"""Child processes: results, errors and ends come to the parent."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from embodied.core.errors import UserError
from embodied.core.process.child import ChildDied, ChildObject

ANSWERS = "tests.envs.children:Answers"


@pytest.fixture
def child() -> Iterator[ChildObject]:
    with closing(ChildObject(ANSWERS)) as child:
        yield child


def test_answers_errors_and_ends_come_to_the_parent(child: ChildObject, capfd: pytest.CaptureFixture[str]) -> None:
    child.send("double", 4)
    assert child.receive() == 8
    with pytest.raises(UserError, match=r"^key: got 1$"):
        child.call("refuse")
    assert child.call("double", 5) == 10
    with pytest.raises(ChildDied, match="exit code 1: RuntimeError: out of luck"):
        child.call("fail")
    with pytest.raises(ChildDied):
        child.call("double", 5)
    assert capfd.readouterr().out == ""


def test_it_ends_with_its_parent_and_survives_ctrl_c(child: ChildObject) -> None:
    assert child.call("double", 1) == 2
    os.kill(child.process.pid, signal.SIGINT)
    assert child.call("double", 1) == 2
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process.pid, 0)
    child.close()


def test_a_crash_names_the_signal(child: ChildObject) -> None:
    with pytest.raises(ChildDied, match="ended by SIGSEGV") as caught:
        child.call("describe", None)
    assert caught.value.returncode == -signal.SIGSEGV
