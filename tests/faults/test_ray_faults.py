"""Processes of a run on Ray that die and hang. Tests with ``run`` follow each other: each continues the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from torch import Tensor

from algos.ppo import PPO
from algos.ppo_config import PPOConfig
from embodied.core.types import Timestep
from embodied.runtime import checkpoint
from embodied.runtime.ledger import Ticket
from embodied.runtime.ray.cluster import Cluster
from envs.common.sampler import INCARNATION
from tests.runtime.builders import build, iterate
from tests.runtime.point_env import PointEnv

T = TypeVar("T")
pytestmark = [
    pytest.mark.slow(reason="starts Ray and processes that import torch, and waits for deadlines"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]


class SlowEnv(PointEnv):
    """A fragment takes long enough to be interrupted."""

    def step(self, action: Tensor) -> Timestep:
        time.sleep(0.02)
        return super().step(action)


class BrokenEnv(PointEnv):
    """Raises at its first step."""

    def step(self, action: Tensor) -> Timestep:
        raise ArithmeticError("broken")


class FatalPPO(PPO):
    """Its process is killed after the optimiser step and before the publication, once a file exists."""

    flag: Path

    def update(self, fragments: Any, version: int) -> Any:
        metrics = super().update(fragments, version)
        if self.flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics


def make_fatal(flag: Path, policy: Any) -> FatalPPO:
    algorithm = FatalPPO(policy, PPOConfig(epochs=1), seed=0, device=torch.device("cpu"))
    algorithm.flag = flag
    return algorithm


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray") / "kill the learner"


@pytest.fixture(scope="module")
def run(ray_cluster: Cluster, flag: Path) -> Iterator[Any]:
    options = {"num_env_workers": 2, "groups_per_worker": 1, "max_staleness": 1, "answer_timeout_s": 6.0}
    with build(
        lambda num_envs, _: SlowEnv(num_envs), make_algorithm=partial(make_fatal, flag), name="ray", **options
    ) as runtime:
        iterate(runtime, 2)
        yield runtime


def inside(run: Any, look: Callable[[], T]) -> T:
    """Result of ``look`` in the controller's thread, between two events."""
    found: list[T] = []
    done = threading.Event()
    run.controller.post(lambda: (found.append(look()), done.set()))
    assert done.wait(20)
    return found[0]


def check_credits(run: Any) -> None:
    """Every lease is a group's ticket of a living worker, and no more is admitted than the ledger's bound."""

    def look() -> tuple[int, list[Ticket], list[int]]:
        controller = run.controller
        tickets = [slot.ticket for slot in controller.slots if slot.ticket is not None]
        return run.ledger.in_flight, tickets, [controller.supervision.incarnation(name) for name in controller.workers]

    in_flight, tickets, incarnations = inside(run, look)
    assert in_flight == len(tickets)
    assert all(ticket.incarnation == incarnations[ticket.worker] for ticket in tickets)
    ahead = run.ledger.accepted + in_flight - run.ledger.version * run.ledger.batch_fragments
    assert 0 <= ahead <= 2 * run.ledger.batch_fragments


def ends(pid: int) -> bool:
    """Whether a process ends, and is collected by its parent."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("part", ["env worker 0", "actor server 0"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_part_that_dies_or_hangs_in_mid_fragment_is_replaced(run: Any, part: str, how: signal.Signals) -> None:
    supervision, workers = run.controller.supervision, run.controller.workers
    before = {name: supervision.incarnation(name) for name in (part, *workers)}
    pid, began = run.controller.parts[part].built.pid, run.iteration
    os.kill(pid, how)
    deadline = time.monotonic() + 100
    while not supervision.is_up(part, before[part] + 1):
        assert time.monotonic() < deadline
        assert iterate(run, 1)[0].metrics["async/staleness_max"] <= 1
    done = iterate(run, 2)
    assert done[-1].index >= began + 2
    assert done[-1].metrics["async/restarts"] >= 1
    assert max(iteration.metrics["async/staleness_max"] for iteration in done) <= 1
    others = [name for name in workers if name != part]
    assert [supervision.incarnation(name) for name in others] == [before[name] for name in others], "only it was lost"
    assert ends(pid)
    check_credits(run)


def test_what_replaces_a_worker_has_other_episodes_and_a_checkpoint_remembers_it(run: Any) -> None:
    state = run.state_dict()["runtime"]
    lost = run.controller.supervision.incarnation("env worker 0")
    assert lost >= 2
    assert state["incarnations"] == [lost, 0]
    numbers = [int(group["sampler"]["number"].min()) for group in state["groups"]]
    assert numbers[0] >= lost * INCARNATION
    assert numbers[1] < INCARNATION


def test_a_late_answer_of_an_old_incarnation_is_refused(run: Any) -> None:
    controller = run.controller
    slot = controller.slots[0]

    def answer_late() -> bool:
        before = run.ledger.accepted
        late = Ticket(run.ledger.accepted, 0, 0, incarnation=0)
        controller._on_sampled(slot, late, None, "actor server 0", 0, "env worker 0", 0, None)
        return run.ledger.accepted == before

    assert inside(run, answer_late)
    iterate(run, 1)
    check_credits(run)


def test_a_learner_killed_before_it_publishes_ends_the_run_and_its_checkpoint_goes_on(
    run: Any, flag: Path, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, run.env_steps, run.state_dict())
    saved = run.iteration
    flag.touch()
    began = time.monotonic()
    with pytest.raises(Exception, match="died") as caught:
        iterate(run, 3)
    assert "ActorDied" in type(caught.value).__name__
    assert time.monotonic() - began < 30
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    with build(name="local", max_staleness=1, num_env_workers=2, groups_per_worker=1) as runtime:
        runtime.load_state_dict(found.state)
        assert iterate(runtime, 1)[0].index == saved + 1
        assert runtime.state_dict()["runtime"]["incarnations"][0] >= 2


def test_a_crash_loop_ends_the_run_with_the_first_exception(ray_cluster: Cluster) -> None:
    with pytest.raises(ArithmeticError, match="broken"), build(
        lambda num_envs, _: BrokenEnv(num_envs), name="ray", groups_per_worker=1, max_failures=1
    ) as runtime:  # fmt: skip
        iterate(runtime, 1)
    assert runtime.controller.supervision.restarts == 1


def test_ctrl_c_saves_and_leaves_no_process(ray_installed: None, root: Path, tmp_path: Path) -> None:
    """The signal goes to the whole group of processes, as from a terminal."""
    command = "task=reach policy=gaussian runtime=ray num_envs=16 runtime.eval_every=0 eval_episodes=0"
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied.train", *command.split(), f"out={tmp_path / 'run'}"],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()[1][-2000:]
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("Hos" in child.name() for child in children)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors[-2000:]
    result = json.loads(output.splitlines()[-1])
    found = checkpoint.load_latest(tmp_path / "run")
    assert found is not None
    assert found.env_steps == result["env_steps"] > 0
    _, alive = psutil.wait_procs(children, 10)
    assert [child.name() for child in alive] == []
