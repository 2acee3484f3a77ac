"""Recorded kernels on a GPU give what the function gives. That they wait for nothing is tested without one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.device import CPU
from embodied.core.graphs import MAX_GRAPHS, Recorded
from embodied.policies.config import FlowConfig
from embodied.policies.flow.policy import FlowPolicy
from tests.algos.fragments import FLOW, SPEC, rollout

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a build of torch for it")
Parts = dict[str, Tensor]


def scaled(parts: Parts, factor: float) -> Parts:
    return {name: factor * part.sin() for name, part in parts.items()}


def test_on_a_cpu_the_function_is_called_as_it_is() -> None:
    seen: list[object] = []
    argument = torch.ones(3)
    assert Recorded(seen.append, CPU)(argument) is None
    assert seen == [argument]


@gpu
def test_results_are_those_of_the_function_and_stay_so() -> None:
    device = torch.device("cuda", 0)
    recorded = Recorded(scaled, device)
    for size in range(1, MAX_GRAPHS + 3):  # the last are not recorded
        given = [{"x": torch.randn(size, device=device), "y": torch.randn(2, size, device=device)} for _ in range(4)]
        results = [recorded(parts, 2.0) for parts in given]
        for parts, result in zip(given, results, strict=True):
            torch.testing.assert_close(result, scaled(parts, 2.0), rtol=0, atol=0)
    torch.testing.assert_close(recorded(given[0], 3.0), scaled(given[0], 3.0), rtol=0, atol=0)


@gpu
def test_weights_that_change_in_place_are_read_anew() -> None:
    device = torch.device("cuda", 0)
    layer = torch.nn.Linear(4, 4, device=device)
    recorded, x = Recorded(layer.forward, device), torch.randn(8, 4, device=device)
    for _ in range(4):
        torch.testing.assert_close(recorded(x), layer(x))
        with torch.no_grad():
            layer.weight.mul_(0.5)


@gpu
def test_threads_record_while_others_compute() -> None:
    device, failed = torch.device("cuda", 0), []

    def work() -> None:
        try:
            recorded = Recorded(scaled, device)
            for size in (8, 9, 10):
                parts = {"x": torch.randn(size, size).to(device)}  # a GPU draws no numbers while one records
                for _ in range(20):
                    torch.testing.assert_close(recorded(parts, 2.0), scaled(parts, 2.0))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class PlainPPO(PPO):
    """Not recorded, because it does not say that it can be."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=gpu)])
def test_ten_recorded_updates_are_the_plain_ones(device: str) -> None:
    weights, rates = [], []
    for kind in (PPO, PlainPPO):
        torch.manual_seed(0)
        policy = FlowPolicy(SPEC, FlowConfig(scale_values=True, **FLOW))
        fragments = [rollout(policy, seed=seed, version=seed) for seed in range(10)]
        algorithm = kind(policy, PPOConfig(desired_kl=0.003), seed=0, device=torch.device(device))
        metrics = [algorithm.update([fragment], version) for version, fragment in enumerate(fragments)]
        rates.append([row["train/learning_rate"] for row in metrics])
        weights.append([weight.cpu() for weight in policy.state_dict().values()])
    assert len(set(rates[0])) > 3
    torch.testing.assert_close(rates[0], rates[1])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
