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
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.types import Timestep
from embodied.envs.episodes.sampler import INCARNATION
from embodied.report.metrics import read_metrics
from embodied.runtime import checkpoint
from embodied.runtime.ledger import Ticket
from embodied.runtime.loop import LearnerLost
from embodied.runtime.ray.cluster import Cluster
from tests.runtime.builders import build, iterate
from tests.runtime.point_env import PointEnv
from tests.runtime.test_runtimes import assert_same

T = TypeVar("T")
pytestmark = [
    pytest.mark.slow(reason="starts Ray and processes that import torch, and waits for deadlines"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]


class SlowEnv(PointEnv):
    """A fragment takes long enough to be interrupted. Once a file exists, the next decision leads to NaN."""

    def __init__(self, num_envs: int, diverges: Path | None = None) -> None:
        super().__init__(num_envs)
        self.diverges = diverges

    def step(self, action: Tensor) -> Timestep:
        time.sleep(0.02)
        if self.diverges is not None and self.diverges.exists():
            self.diverges.unlink(missing_ok=True)
            self.position_N2[0] = torch.nan
        return super().step(action)


class BrokenEnv(PointEnv):
    """Raises at its first step."""

    def step(self, action: Tensor) -> Timestep:
        raise ArithmeticError("broken")


class FatalPPO(PPO):
    """Its process dies or hangs, once, where a file in ``flags`` says it; "always" kills it in every update."""

    flags: Path

    def update(self, fragments: Any, version: int) -> Any:
        for fragment in fragments:
            age_TN = version - fragment.version_TN
            assert 0 <= age_TN.min(), "weights of a learner that was lost"
            assert age_TN.max() <= 1
        metrics = super().update(fragments, version)
        self.suffer("killed before it publishes")
        self.suffer("never ends its update")
        return metrics

    def state_dict(self) -> Any:
        self.suffer("killed while it is saved")
        return super().state_dict()

    def suffer(self, how: str) -> None:
        if (self.flags / how).exists():
            (self.flags / how).unlink()
            time.sleep(600 if how.startswith("never") else 0)
        elif not (self.flags / "always").exists():
            return
        os.kill(os.getpid(), signal.SIGKILL)


def make_fatal(flags: Path, policy: Any) -> FatalPPO:
    algorithm = FatalPPO(policy, PPOConfig(epochs=1), seed=0, device=torch.device("cpu"))
    algorithm.flags = flags
    return algorithm


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def run(ray_cluster: Cluster, flags: Path) -> Iterator[Any]:
    options: dict[str, Any] = {"num_env_workers": 2, "groups_per_worker": 1, "max_staleness": 1, "max_failures": 1}
    options |= {"answer_timeout_s": 6.0, "update_timeout_s": 6.0}
    options["make_algorithm"] = partial(make_fatal, flags)
    with build(lambda num_envs, _: SlowEnv(num_envs, flags / "diverges"), name="ray", **options) as runtime:
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
    """Every lease is a group's ticket of living worker and learner, and no more is admitted than the ledger's bound."""

    def look() -> tuple[int, list[Ticket], list[int]]:
        controller = run.controller
        held = [slot.ticket for slot in controller.slots if slot.ticket is not None]
        tickets = [ticket for ticket in held if ticket.learner == run.learner.incarnation]
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


def test_an_env_that_turns_nan_is_replaced_and_nothing_is_learned_from_it(run: Any, flags: Path) -> None:
    """Environments refuse the next action, which is NaN; a fragment that ends there is refused itself."""
    restarts = run.controller.supervision.restarts
    (flags / "diverges").touch()
    while run.controller.supervision.restarts == restarts:
        iterate(run, 1)
    iterate(run, 2)
    for name, value in run.policy.state_dict().items():
        assert value.isfinite().all(), name
    check_credits(run)


def test_what_replaces_a_worker_has_other_episodes_and_a_checkpoint_remembers_it(run: Any) -> None:
    state = run.state_dict()["runtime"]
    lost = run.controller.supervision.incarnation("env worker 0")
    assert lost >= 2
    assert state["incarnations"] == [lost, run.controller.supervision.incarnation("env worker 1")]
    numbers = [int(group["sampler"]["number"].min()) for group in state["groups"]]
    for number, incarnation in zip(numbers, state["incarnations"], strict=True):
        assert incarnation * INCARNATION <= number < (incarnation + 1) * INCARNATION


def test_a_late_answer_of_an_old_incarnation_is_refused(run: Any) -> None:
    assert refuses(run, incarnation=0)
    iterate(run, 1)
    check_credits(run)


def refuses(run: Any, **old: int) -> bool:
    """Whether a late answer changes nothing. old: incarnations of its ticket that are not the present ones."""
    controller = run.controller

    def answer_late() -> bool:
        before = run.ledger.accepted
        worker, learner = controller.supervision.incarnation("env worker 0"), run.learner.incarnation
        late = Ticket(before, 0, 0, **({"incarnation": worker, "learner": learner} | old))
        controller._on_sampled(controller.slots[0], late, None, "actor server 0", 0, "env worker 0", 0, None)
        return run.ledger.accepted == before

    return inside(run, answer_late)


def states(run: Any) -> dict[str, tuple[int, int]]:
    """Incarnation and process of every part but the learner."""
    controller = run.controller
    names = (*controller.workers, *controller.servers)
    return {name: (controller.supervision.incarnation(name), controller.parts[name].built.pid) for name in names}


@pytest.mark.parametrize(
    "how", ["at first", "killed before it publishes", "never ends its update", "killed while it is saved", "stopped"]
)
def test_a_learner_that_is_lost_is_replaced_and_goes_on_from_its_last_state(run: Any, flags: Path, how: str) -> None:
    """What it learned since that state is lost, and nothing else; "at first": there is no state yet."""
    state = None if how == "at first" else run.state_dict()
    iterate(run, 2)
    others, restarts, pid = states(run), run.controller.supervision.restarts, run.controller.parts["learner"].built.pid
    incarnations = run.incarnations
    if how in ("stopped", "at first"):
        os.kill(pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    else:
        (flags / how).touch()
    with pytest.raises(LearnerLost) as caught:
        work(run)
    reached = run.iteration
    caught.value.recover(state)
    counters = {"iteration": 0, "env_steps": 0} if state is None else state["runtime"]["counters"]
    assert {"iteration": run.iteration, "env_steps": run.env_steps} == counters
    if state is not None:
        assert_same(inside_learner(run), {key: state[key] for key in ("policy", "algorithm")})
    again = reached - counters["iteration"] + 2  # to more than what was reached, which is useful work
    done = iterate(run, again)
    assert [iteration.index for iteration in done] == [counters["iteration"] + 1 + i for i in range(again)]
    assert done[-1].metrics["async/restarts"] == restarts + 1
    assert states(run) == others, "all other parts stay"
    assert run.incarnations == incarnations
    assert ends(pid)
    assert refuses(run, learner=run.learner.incarnation - 1)
    check_credits(run)


def work(run: Any) -> None:
    """Do all that needs the learner."""
    iterate(run, 3)
    run.state_dict()


def inside_learner(run: Any) -> dict[str, Any]:
    state = run.learner.state_dict()
    return {key: state[key] for key in ("policy", "algorithm")}


def test_a_learner_in_a_crash_loop_ends_the_run_with_the_first_exception(run: Any, flags: Path) -> None:
    """The last test of this run."""
    state = run.state_dict()
    restarts = run.controller.supervision.restarts
    (flags / "always").touch()
    with pytest.raises(LearnerLost) as first:
        work(run)
    first.value.recover(state)
    with pytest.raises(LearnerLost) as second:
        work(run)
    with pytest.raises(type(first.value.__cause__)) as caught:  # type: ignore[arg-type]
        second.value.recover(state)
    assert str(caught.value).split() == str(first.value.__cause__).split()
    assert run.controller.supervision.restarts == restarts + 1


def test_a_crash_loop_ends_the_run_with_the_first_exception(ray_cluster: Cluster) -> None:
    with pytest.raises(ArithmeticError, match="broken"), build(
        lambda num_envs, _: BrokenEnv(num_envs), name="ray", groups_per_worker=1, max_failures=1
    ) as runtime:  # fmt: skip
        iterate(runtime, 1)
    assert runtime.controller.supervision.restarts == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_training_goes_on_without_its_learner_and_a_signal_leaves_no_process(
    ray_installed: None, root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Rows after the last checkpoint are repeated. The signal goes to all processes, as from a terminal."""
    command = "task=reach policy=gaussian runtime=ray num_envs=16 runtime.eval_every=0 eval_episodes=0"
    command += " checkpoint_minutes=0.03"
    shared = set(Path("/dev/shm").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied.train", *command.split(), f"out={tmp_path / 'run'}"],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"

    def wait(until: Callable[[list[int]], bool]) -> None:
        while not until([row["iteration"] for row in read_metrics(metrics)]):
            assert process.poll() is None, process.communicate()[1][-2000:]
            time.sleep(0.05)

    wait(lambda iterations: len(iterations) > 2 and (tmp_path / "run/checkpoints/last").exists())
    (learner,) = [child for child in psutil.Process(process.pid).children(recursive=True) if is_host(child, "Learner")]
    learner.kill()
    reached = read_metrics(metrics)[-1]["iteration"]
    wait(lambda iterations: psutil.Process(process.pid).is_running() and iterations[-1] > reached + 2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert any(is_host(child, "Learner") for child in children)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors[-2000:]
    assert "the learner was lost" in errors
    assert f"going on from {tmp_path / 'run/checkpoints/step_'}" in errors
    rows = read_metrics(metrics)
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    for before, after in pairwise(rows):
        assert before["env_steps"] < after["env_steps"]
        assert before["wall_s"] < after["wall_s"]
    assert rows[-1]["async/restarts"] == 1
    assert max(row["async/staleness_max"] for row in rows) <= 1
    result = json.loads(output.splitlines()[-1])
    found = checkpoint.load_latest(tmp_path / "run")
    assert found is not None
    assert found.env_steps == result["env_steps"] > 0
    _, alive = psutil.wait_procs(children, 10)
    assert [child.name() for child in alive] == []
    assert set(Path("/dev/shm").iterdir()) <= shared


def is_host(process: psutil.Process, part: str) -> bool:
    return part in " ".join(process.cmdline()) and "Host" in " ".join(process.cmdline())
