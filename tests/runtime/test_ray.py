"""Runs on Ray: equal to sync without staleness, refused where a cluster does not fit, closed to the network."""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from embodied.core.errors import UserError
from embodied.core.seeds import SEEDS
from embodied.runtime.channel import WeightStore
from embodied.runtime.ray.cluster import Cluster
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.watch import EDGES
from tests.runtime.builders import DECISIONS, NUM_ENVS, build, iterate
from tests.runtime.point_env import PointEnv
from tests.runtime.test_runtimes import assert_same, timeless
from tests.runtime.test_track import PARTS

pytestmark = [
    pytest.mark.slow(reason="starts Ray and processes that import torch"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]
LAYOUT = {"num_env_workers": 2, "groups_per_worker": 2, "max_staleness": 0, "eval_every": 2}


def state_of(runtime: Any) -> dict[str, Any]:
    state: dict[str, Any] = runtime.state_dict()
    state["runtime"].pop("evaluated_at")  # an evaluation aside takes place when it is free
    return state


def test_without_staleness_it_is_bit_identical_to_sync_and_goes_on_from_its_state(ray_cluster: Cluster) -> None:
    with build(name="sync", **LAYOUT) as runtime:
        first = iterate(runtime, 3)
        middle = runtime.state_dict()
        expected = state_of(runtime)
        then = iterate(runtime, 3)
        end = state_of(runtime)
    with build(name="ray", num_actor_servers=2, **LAYOUT) as runtime:
        found = iterate(runtime, 3)
        assert_same(state_of(runtime), expected)
        assert [timeless(i.metrics) for i in found] == [timeless(i.metrics) for i in first]
        for key in ("perf/env_steps_per_s", "perf/sim_s", "perf/infer_s", "perf/learn_s", "perf/wait_s"):
            assert sum(i.metrics[key] for i in found) > 0, key
        for part, activities in PARTS.items():
            assert all(f"time/{part}/{activity}" in found[-1].metrics for activity in activities), part
        sent = {edge: sum(i.metrics.get(f"bytes/{edge}_per_s", 0.0) for i in found) for edge in EDGES}
        assert min(sent.values()) > 0, sent
        assert sum(found[-1].histograms["async/staleness"].values()) == DECISIONS * NUM_ENVS
        assert runtime.resume_note == "exactly, bit for bit"
        assert runtime.layout_note == "processes: env workers 2, actor servers 2, learner 1"
    with build(name="ray", confirm_at=0.0, **LAYOUT) as runtime:
        runtime.load_state_dict(middle)
        found = iterate(runtime, 3)
        assert [timeless(i.metrics) for i in found] == [timeless(i.metrics) for i in then]
        assert_same(state_of(runtime), end)
        results = [i.evaluation for i in (*found, *iterate(runtime, 30)) if i.evaluation]
        assert results
        assert 2 * results[0]["episodes"] == results[0]["confirmation"]["episodes"] == 10
        assert results[0]["confirmation"]["seed"] == SEEDS + results[0]["iteration"]
        runtime.keep_evaluated()
        kept = copy.deepcopy(runtime.evaluator.weights)
        assert_same(runtime.state_dict()["policy"], kept)
    assert_same(dict(runtime.policy.state_dict()), kept)
    for name, value in kept.items():
        assert value.isfinite().all(), name
    hosts = [process for process in psutil.Process().children(recursive=True) if "Hos" in process.name()]
    assert psutil.wait_procs(hosts, 10)[1] == [], "a closed runtime leaves no process of a part"


def test_nothing_listens_on_other_interfaces(ray_cluster: Cluster) -> None:
    addresses = {
        connection.laddr.ip
        for process in (psutil.Process(), *psutil.Process().children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env_worker": {"resources": {"unicorn": 1}}}, "env worker 0 needs unicorn: 1 on one node"),
        ({"learner": {"resources": {"GPU": 64}}}, "learner needs GPU: 64"),
        ({"actor_server": {"labels": {"zone": "moon"}}}, "actor server 0 needs a node with the label zone=moon"),
    ],
)
def test_a_part_that_fits_nowhere_is_named(ray_cluster: Cluster, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(name="ray", **options)


def test_all_parts_together_must_fit(ray_cluster: Cluster) -> None:
    cores = int(ray_cluster.ray.cluster_resources()["CPU"])
    with pytest.raises(UserError, match="too little CPU for all parts: env worker 1"):
        build(name="ray", num_env_workers=2, env_worker={"resources": {"CPU": cores}})


def test_an_error_in_building_a_worker_is_raised_as_it_is(ray_cluster: Cluster) -> None:
    with pytest.raises(UserError, match="no room for 6 envs"):
        build(refusing, name="ray")


def refusing(num_envs: int, num_threads: int) -> Any:
    """Build the one env of the spec only."""
    if num_envs > 1:
        raise UserError(f"no room for {num_envs} envs")
    return PointEnv(num_envs)


@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "another server listens"])
def test_no_cluster_at_the_address(listens: bool, ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied.runtime.ray.cluster.REACH_S", 2.0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"runtime.address={address}: "):
            Cluster(address)


@pytest.mark.parametrize("address", ["nonsense", "host:port", "ray://127.0.0.1:10001x"])
def test_what_is_no_address(address: str, ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(UserError, match="host:port"):
        Cluster(address)


def test_auto_is_the_cluster_of_the_environment(ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(UserError, match=r"runtime.address=auto is RAY_ADDRESS=nonsense: allowed are host:port"):
        Cluster("auto")


def own_cluster(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a cluster of our own, and end it, in a process with these variables of the environment."""
    code = "from embodied.runtime.ray.cluster import Cluster\nCluster(None).close()"
    words, environment = [sys.executable, "-c", code], os.environ | variables
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_a_cluster_of_our_own_is_not_that_of_the_environment(ray_installed: None, root: Path) -> None:
    done = own_cluster(root, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 0, done.stderr


def test_a_folder_that_holds_no_sockets_is_named(ray_installed: None, root: Path, tmp_path: Path) -> None:
    long, missing = tmp_path / ("x" * 90), tmp_path / "missing"
    long.mkdir()
    for folder, reason in ((long, "path length cannot exceed 107 bytes"), (missing, "No such file or directory")):
        error = own_cluster(root, RAY_TMPDIR=str(folder)).stderr.splitlines()[-1]
        assert error.startswith(f"embodied.core.errors.UserError: Ray cannot start in {folder} (")
        assert reason in error
        assert "set RAY_TMPDIR to another folder" in error
    assert not list(long.iterdir())


def test_fragments_of_a_lost_node_are_left_out(ray_installed: None) -> None:
    from ray.exceptions import ObjectLostError

    from embodied.runtime.ray.wire import fetch

    async def found(value: int) -> int:
        return value

    async def lost() -> int:
        raise ObjectLostError("00", None, "")

    async def broken() -> int:
        raise ArithmeticError

    async def fetched(*references: Any) -> list[int]:
        return await fetch(references)

    assert asyncio.run(fetched(found(1), lost(), found(2))) == [1, 2]
    with pytest.raises(ObjectLostError):
        asyncio.run(fetched(lost(), lost()))
    with pytest.raises(ArithmeticError):
        asyncio.run(fetched(found(1), broken()))


def test_weights_are_pulled_once_and_checked(ray_cluster: Cluster) -> None:
    """Frozen tensors travel with the first version alone; a late reader gets all; other values are refused."""
    from embodied.runtime.ray.wire import DamagedWeights, Publisher, PulledWeights

    store, publisher, state = WeightStore(), Publisher(), {"frozen": torch.zeros(3), "trained": torch.zeros(2)}
    early, late = PulledWeights(), PulledWeights()
    publications = []
    for version in range(3):
        state["trained"] += 1
        store.publish(version, state, frozen={"frozen"})
        publications.append(publisher.put(store.latest()))
    assert publications[2].groups[0] is publications[0].groups[0]
    for publication in (publications[0], publications[2], publications[1]):
        early.offer(publication)
        asyncio.run(early.pull())
    late.offer(publications[2])
    asyncio.run(late.pull())
    for reader in (early, late):
        assert reader.version == 2
        assert reader.latest().tensors["trained"].tolist() == [3.0, 3.0]
        assert reader.latest().tensors["frozen"].tolist() == [0.0, 0.0, 0.0]
        assert dict(reader.latest().changed) == {"frozen": 0, "trained": 2}
    other = replace(publications[2].groups[1], tensors=publications[1].groups[1].tensors)
    wrong = PulledWeights()
    wrong.offer(replace(publications[2], groups=(publications[2].groups[0], other)))
    with pytest.raises(DamagedWeights, match="version 2"):
        asyncio.run(wrong.pull())


class SlowEnv(PointEnv):
    """Far slower than the others, if it has four envs."""

    def step(self, action: torch.Tensor) -> Any:
        time.sleep(0.2 if self.num_envs == 4 else 0.0)
        return super().step(action)


def test_batches_in_order_of_arrival_mask_what_is_too_old(ray_cluster: Cluster) -> None:
    options = {"max_staleness": 1, "order": "arrival", "num_env_workers": 2, "num_envs": 13}
    with build(lambda num_envs, _: SlowEnv(num_envs), name="ray", **options) as runtime:
        for iteration in runtime.iterations():
            assert iteration.metrics["async/staleness_max"] <= 1
            if iteration.metrics["async/dropped"] > 0:
                break
            assert iteration.index < 200, "the slow group holds up the others, or nothing is masked"


def test_placements_are_options() -> None:
    config = RayConfig(env_worker={"resources": {"CPU": 2}})
    assert config.env_worker.resources == {"CPU": 2.0}
    with pytest.raises(UserError, match="resources"):
        RayConfig(env_worker={"resources": {"CPU": -1}})


def test_late_env_workers_need_staleness_and_cannot_be_more_than_all() -> None:
    assert RayConfig(num_env_workers=2, min_env_workers=2, max_staleness=0).needed_workers(2) == 2
    with pytest.raises(UserError, match=r"min_env_workers=1 needs max_staleness of at least 1, got 0"):
        RayConfig(num_env_workers=2, min_env_workers=1, max_staleness=0)
    with pytest.raises(UserError, match=r"min_env_workers=3 is more than runtime.num_env_workers=2"):
        RayConfig(num_env_workers=2, min_env_workers=3)


def test_only_ray_goes_on_without_env_workers_that_a_checkpoint_lacks() -> None:
    with build(name="sync") as runtime:
        state = runtime.state_dict()
        state["runtime"]["groups"][1] = None
        with pytest.raises(UserError, match="resume it with runtime=ray"):
            runtime.load_state_dict(state)


def test_a_configuration_names_it(tmp_path: Path) -> None:
    from embodied.session.config import compose_run

    config = compose_run({"task": "lift", "runtime": "ray", "runtime.env_worker.resources.CPU": 4})
    options = config.runtime
    assert isinstance(options, RayConfig)
    assert options.env_worker.resources == {"CPU": 4.0}
    assert options.max_staleness == 1
    with pytest.raises(UserError, match=r"runtime\.num_actor_server.*num_actor_servers"):
        compose_run({"task": "lift", "runtime": "ray", "runtime.num_actor_server": 2})
