"""Nodes on one machine, by Ray's own utility: one is lost, others join, and object stores that are too small.

They are in a process of their own, because this one is connected to the cluster of the other tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec, Term
from embodied.core.types import Obs
from embodied.policies.gaussian import GaussianPolicy
from embodied.runtime.loop import LearnerLost
from embodied.runtime.ray import cluster as own
from tests.runtime.builders import build, iterate, make_policy
from tests.runtime.point_env import PointEnv, point_spec

pytestmark = [
    pytest.mark.slow(reason="starts two nodes of Ray and processes that import torch"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]
STORE_BYTES = 80 * 1024**2
"""Of each node; Ray allows no less than 75 MiB."""
WIDTH = 80_000
"""Numbers of an observation: a fragment of six envs and five decisions takes 9.6 MB."""


class WideEnv(PointEnv):
    """Observations that are large."""

    def __init__(self, num_envs: int) -> None:
        spec = point_spec()
        super().__init__(num_envs, spec=EnvSpec(**{**vars_of(spec), "state": (*spec.state, Term("padding", WIDTH))}))

    def observe(self, ids: Any = None) -> Obs:
        state = super().observe(ids)["state"]
        return {"state": torch.cat([state, torch.zeros(len(state), WIDTH)], -1)}


def vars_of(spec: EnvSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


class SlowPPO(PPO):
    """Workers are ahead of it by as much as the ledger admits."""

    def update(self, fragments: Any, version: int) -> Any:
        time.sleep(0.3)
        return super().update(fragments, version)


def make_slow(policy: Any) -> PPO:
    return SlowPPO(policy, PPOConfig(epochs=1), seed=0, device=torch.device("cpu"))


def make_large(spec: EnvSpec) -> GaussianPolicy:
    policy = make_policy(spec)
    policy.large = torch.nn.Parameter(torch.zeros(25_000_000))
    return policy


def refusal(**options: Any) -> str:
    """Message with which a run is refused."""
    try:
        build(name="ray", **options)
    except UserError as error:
        return str(error)
    raise AssertionError("it was not refused")


@contextmanager
def elsewhere(package: str, folder: str) -> Iterator[None]:
    """Let a package of the project be in a folder for this process alone, so that nodes have another one or none."""
    before = sys.modules.get(package)
    own.PACKAGES = (*{*own.PACKAGES, package},)
    sys.modules[package] = module = ModuleType(package)
    module.__spec__ = ModuleSpec(package, None, is_package=True)
    module.__spec__.submodule_search_locations = [folder]
    yield
    own.PACKAGES = tuple(name for name in own.PACKAGES if before or name != package)
    del sys.modules[package]
    if before is not None:
        sys.modules[package] = before


def two_nodes(folder: str) -> None:
    """Train on two nodes, and print what happened. folder: of Ray's files."""
    os.environ |= {"RAY_TMPDIR": folder, "RAY_health_check_period_ms": "500"}
    own.prepare_environment()
    import ray
    from ray.cluster_utils import Cluster

    common = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES, "resources": {"sim": 1.0}}
    (Path(folder) / "ray").mkdir(parents=True)  # where the utility notes the address
    nodes = Cluster()
    nodes.add_node(**{**common, "resources": {"sim": 1.0, "head": 1.0}}, num_cpus=2, include_dashboard=False)
    second = nodes.add_node(**common)
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"address": "auto", "num_env_workers": 3, "groups_per_worker": 1}
    found["large"] = refusal(make_policy=make_large, **options)
    for name in ("embodied.algos", "only_here"):
        with elsewhere(name, folder):
            found[name] = refusal(**options)
    options |= {"env_worker": {"resources": {"sim": 1.0}}, "learner": {"resources": {"head": 1.0}}}
    found["too_few"] = refusal(**options)
    options |= {"address": nodes.address, "max_staleness": 4, "min_env_workers": 1}
    with build(lambda num_envs, _: WideEnv(num_envs), make_algorithm=make_slow, name="ray", **options) as runtime:
        found["spilled"] = until(runtime, lambda metrics: any(Path(folder).rglob("ray_spilled_objects*/*")))
        controller: Any = runtime.controller  # type: ignore[attr-defined]
        head = ray.get_runtime_context().get_node_id()

        def away() -> list[Any]:  # the other node's worker may join later
            return [x for x in controller.workers if (built := controller.parts[x].built) and built.node != head]

        until(runtime, lambda metrics: bool(away()))
        lost, before = away()[0], runtime.state_dict()
        nodes.remove_node(second, allow_graceful=False)

        def go_on_alone() -> None:
            found["lost"] = until(runtime, lambda metrics: controller.supervision.incarnation(lost) > 0)
            found["alone"] = iterate(runtime, 3)[-1].index

        try:
            go_on_alone()
        except LearnerLost as error:  # the node had all fragments of a batch: as a session does, continue from a state
            error.recover(before)
            go_on_alone()
        state = runtime.state_dict()
        found["saved_alone"] = [group is not None for group in state["runtime"]["groups"]]
        found["workers_alone"] = controller.num_up
        nodes.add_node(**common)
        found["two"] = until(runtime, lambda metrics: metrics["async/env_workers"] == 2)
        nodes.add_node(**common)
        found["three"] = until(runtime, lambda metrics: metrics["async/env_workers"] == 3)
        done = iterate(runtime, 3)
        found["end"], found["staleness"] = done[-1].index, done[-1].metrics["async/staleness_max"]
    with build(lambda num_envs, _: WideEnv(num_envs), make_algorithm=make_slow, name="ray", **options) as runtime:
        while runtime.controller.num_up < 3:  # type: ignore[attr-defined]  # one that joins later gets no state
            time.sleep(0.05)
        runtime.load_state_dict(state)
        until(runtime, lambda metrics: metrics["async/env_workers"] == 3)
        found["resumed_at"] = iterate(runtime, 1)[0].index
        found["seeds_before"] = state["runtime"]["incarnations"]
        found["seeds_after"] = runtime.incarnations
    nodes.shutdown()
    print(json.dumps(found))


def until(runtime: Any, holds: Callable[[dict[str, float]], bool]) -> int:
    """Iterate until something holds; return the iterations so far."""
    deadline = time.monotonic() + 120
    while True:
        (iteration,) = iterate(runtime, 1)
        if holds(iteration.metrics):
            return int(iteration.index)
        assert time.monotonic() < deadline, "waited too long"


def test_a_node_is_lost_and_another_one_joins(ray_installed: None, root: Path) -> None:
    """The fragments that the ledger admits do not fit into the object stores, so Ray spills them to the disk."""
    shared = set(Path("/dev/shm").iterdir())
    folder = tempfile.mkdtemp(prefix="ray-")  # not tmp_path: the names of sockets may not be that long
    code = f"from tests.faults.test_ray_nodes import two_nodes; two_nodes({folder!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(root)}, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-4000:]
    finally:
        process.kill()
        left = [other for other in psutil.process_iter() if folder in " ".join(command(other))]
        left = psutil.wait_procs(left, 10)[1]
        for other in left:
            other.kill()
        shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(output.splitlines()[-1])
    assert left == []
    assert set(Path("/dev/shm").iterdir()) <= shared
    assert "100 MB of weights" in found["large"]
    assert "84 MB" in found["large"]
    assert "another version of this project" in found["embodied.algos"]
    assert "lacks this project" in found["only_here"]
    assert "too little sim" in found["too_few"]
    assert found["workers_alone"] == sum(found["saved_alone"]) == 1, "the others fit on no other node"
    assert found["lost"] < found["alone"] < found["two"] < found["three"] < found["end"]
    assert 0 <= found["staleness"] <= 4
    assert found["resumed_at"] > found["alone"]
    for saved, before, after in zip(found["saved_alone"], found["seeds_before"], found["seeds_after"], strict=True):
        assert after == before if saved else after > before, "without a state it has other episodes than ever before"


def command(process: psutil.Process) -> list[str]:
    """Command line of a process; [] if it has ended."""
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
