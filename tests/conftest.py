"""What all tests share: their order, isolation of torch's global state, and the rule for slow tests."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of several processes wait for each other's cores

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.runtime.ray.cluster import Cluster, prepare_environment

prepare_environment()  # before a test imports Ray, as rl_games does
ROOT = Path(__file__).resolve().parents[1]
# Cheap and decisive first: a wrong likelihood explains whatever fails after it.
FIRST = ("numerics",)
LAST = ("faults", "e2e")


def _rank(item: pytest.Item) -> int:
    room = item.path.relative_to(ROOT / "tests").parts[0]
    if room in FIRST:
        return FIRST.index(room) - len(FIRST)
    return LAST.index(room) + 1 if room in LAST else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)  # stable: within a rank pytest's own order stays
    if "PYTEST_XDIST_WORKER" in os.environ:  # a file of slow tests that starts last would keep one process alone busy
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    for item in items:
        for mark in item.iter_markers("slow"):
            if not mark.kwargs.get("reason"):
                raise pytest.UsageError(f'{item.nodeid}: write pytest.mark.slow(reason="what takes the time")')


@pytest.fixture(autouse=True)
def torch_isolation() -> Iterator[None]:
    """Every test starts from seed 0 and cannot leak thread count or default dtype into the next one."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session", autouse=True)
def quick_kernels() -> None:
    """Compile Warp's kernels without optimisation, in half the time: a test takes few steps."""
    if importlib.util.find_spec("warp") is not None:
        import warp

        warp.config.optimization_level = 0


@pytest.fixture(scope="session")
def ray_installed() -> None:
    """Skip where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install -c constraints.txt -e '.[ray]'")


@pytest.fixture(scope="session")
def ray_cluster(ray_installed: None) -> Iterator[Any]:
    """A Ray cluster on the loopback interface, which the runtimes of all tests use. Starting it takes seconds."""
    cluster = Cluster(None)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT
