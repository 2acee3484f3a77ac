"""Thread counts: per thread in torch, and a plan that fits the cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from embodied.runtime import threads
from embodied.runtime.config import LocalConfig, RuntimeConfig
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.recipe import group_sizes
from tests.runtime.builders import build
from tests.runtime.point_env import PointEnv

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def no_bound_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_each_thread_keeps_its_own_number() -> None:
    seen: dict[int, int] = {}
    both_set = threading.Barrier(2)

    def compute(num_threads: int) -> None:
        threads.use(num_threads)
        both_set.wait(5)
        torch.ones(200, 200, requires_grad=True).square().sum().backward()
        seen[num_threads] = torch.get_num_threads()

    workers = [threading.Thread(target=compute, args=(num,)) for num in (1, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == {1: 1, 3: 3}


def test_phases_that_alternate_have_all_cores() -> None:
    for config in (RuntimeConfig(), LocalConfig(max_staleness=0)):
        budget = threads.plan(config, CPU, cores=8)
        assert (budget.sim, budget.actor, budget.learner) == (8, 8, 8)


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_phases_that_overlap_leave_cores_to_the_simulator(cores: int) -> None:
    config = LocalConfig(max_staleness=1, num_env_workers=2)
    budget = threads.plan(config, CPU, cores=cores)
    assert budget.sim == max(1, cores // 2)
    assert budget.learner + budget.actor <= max(2, cores)
    assert budget.evaluator == 1


@pytest.mark.parametrize(("cores", "learner"), [(1, 1), (2, 1), (4, 2), (16, 2)])
def test_a_small_network_has_few_threads(cores: int, learner: int) -> None:
    budget = threads.plan(LocalConfig(max_staleness=1), CPU, cores=cores, small=True)
    assert (budget.sim, budget.actor, budget.learner) == (cores, max(1, min(2, cores // 4)), learner)
    assert budget.learner_alone == min(2, cores)
    assert threads.plan(LocalConfig(learner_threads=7), CPU, cores=cores, small=True).learner == 7


@pytest.mark.parametrize(("name", "most", "simulated"), [("sync", 2, 16), ("local", 1, 1)])
def test_a_small_network_is_evaluated_with_few_threads_and_simulated_with_all(
    name: str, most: int, simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 cores. Beside training an evaluation has one of each."""
    monkeypatch.setattr(threads, "available_cores", lambda: 16)
    given: list[int] = []

    def make_eval_env(num_envs: int, num_threads: int) -> PointEnv:
        given.append(num_threads)
        return PointEnv(num_envs)

    none = {"sim_threads": 0, "actor_threads": 0, "learner_threads": 0}
    with build(name=name, make_eval_env=make_eval_env, **none) as runtime:
        assert runtime.evaluator.num_threads == most
        runtime.evaluator.make_env().close()
    assert given == [simulated]


def test_overrides_win_and_a_gpu_needs_one_thread() -> None:
    config = LocalConfig(max_staleness=1, sim_threads=3, actor_threads=2, learner_threads=5)
    assert threads.plan(config, CPU, cores=2) == threads.ThreadBudget(3, 2, 5, 5, 1)
    budget = threads.plan(LocalConfig(max_staleness=1), CUDA, cores=16)
    assert (budget.actor, budget.learner) == (1, 1)


@pytest.mark.parametrize(("variable", "most"), [("2", 2), ("3,1", 3), ("16", 8), ("", 8), ("0", 8)])
def test_torch_has_at_most_the_threads_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, most: int
) -> None:
    """``OMP_NUM_THREADS`` on 8 cores. The simulator's threads are not those of OpenMP; an option says more."""
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads.torch_cores(8) == most
    budget = threads.plan(RuntimeConfig(), CPU, cores=8)
    assert (budget.sim, budget.actor, budget.learner, budget.learner_alone) == (8, most, most, most)
    budget = threads.plan(LocalConfig(max_staleness=1), CPU, cores=8)
    assert (budget.sim, budget.actor, budget.learner, budget.learner_alone) == (8, 2, min(4, most), most)
    config = RuntimeConfig(learner_threads=5)
    assert threads.plan(config, CPU, cores=8).learner == 5


@pytest.mark.parametrize("users", [{}, {"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_of_torch_yield_soon_unless_the_user_says_otherwise(users: dict[str, str]) -> None:
    show = "import sys, embodied, os; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    env = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ} | users
    done = subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [users.get("GOMP_SPINCOUNT", "None" if users else "1000"), "False"]


def test_learner_borrows_cores_only_while_the_others_are_idle() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    idle, seen = [False, True, True, False], []
    answers = iter(idle)
    with threads.using_idle_cores(1, 3, lambda: next(answers)):
        for _ in idle:
            optimizer.step()
            seen.append(torch.get_num_threads())
        other = threading.Thread(target=optimizer.step)  # another thread's steps do not count
        other.start()
        other.join()
    assert seen == [1, 3, 3, 1]
    optimizer.step()
    assert torch.get_num_threads() == 1


def test_groups_are_even_and_never_empty() -> None:
    assert group_sizes(10, 2, 2) == [[3, 3], [2, 2]]
    assert group_sizes(3, 2, 2) == [[1, 1], [1]]
    assert group_sizes(1, 1, 2) == [[1]]
    assert sum(map(sum, group_sizes(8191, 3, 2))) == 8191


def test_a_worker_has_two_groups_only_where_the_actor_computes_beside_the_simulator() -> None:
    local, ray = LocalConfig(max_staleness=1), RayConfig()
    assert (local.groups_of_worker(False), local.groups_of_worker(True)) == (1, 2)
    assert (ray.groups_of_worker(False), ray.groups_of_worker(True)) == (2, 2)
    assert LocalConfig(groups_per_worker=3).groups_of_worker(False) == 3


@pytest.mark.parametrize("on_gpu", [False, True])
def test_without_staleness_all_runtimes_have_the_same_groups(on_gpu: bool) -> None:
    """So that their parameters are the same bit for bit."""
    configs = (RuntimeConfig(), LocalConfig(), RayConfig(max_staleness=0))
    assert [config.groups_of_worker(on_gpu) for config in configs] == [1, 1, 1]
