"""Ray: its throughput on one machine, what a broadcast costs the learner, how much of the weights an update changes.

    ray_over_local        control steps per second of runtime=ray / runtime=local: ``lift`` with 1,024 envs, same work
    broadcast_share       seconds that a publication adds to an update / seconds of an update without one
    broadcast_cpu_share   CPU seconds of a publication in the learner's process / CPU seconds of an update

The publication has 100 MB of float32 and eight pullers, each a process on this machine. The first ratio contains the
copy of the weights, their digest, the put, and how much the pulls slow down the update that runs meanwhile. On a
cluster the pullers have cores of their own, so it is an upper bound. The second ratio leaves the pulls out, and hardly
depends on what else uses the machine. The update is PPO with its default options on 512 decisions.

The rows ``<task>_<dtype>_*`` tell whether sending the difference to the version before would pay. They come from
trainings with the recipes' options and fewer environments. They are the share of elements that differ between two
versions, and the bytes of a difference over those of the weights: as positions with new values, or as XOR, in byte
planes and compressed by zlib. bfloat16 is the weights rounded to it. Frozen tensors, which are sent once, do not count.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied.algos.ppo import PPO
from embodied.algos.ppo_config import PPOConfig
from embodied.benchmarks import train
from embodied.benchmarks.fragments import fragment_of
from embodied.benchmarks.measure import Report, in_turns, paired, timed
from embodied.core.spec import EnvSpec
from embodied.policies import FlowConfig, FlowPolicy
from embodied.runtime import threads
from embodied.runtime.ray.cluster import Cluster
from embodied.runtime.sync import SyncRuntime
from embodied.runtime.weight_store import Weights, WeightStore
from embodied.session.config import compose_run
from embodied.trainers.reinforcement import build

if TYPE_CHECKING:  # it imports Ray, which ``Cluster`` has to prepare
    from embodied.runtime.ray.weights import Publication

SPEC = EnvSpec.of_sizes("bench", state=40, privileged=8, action=4, max_episode_steps=80)
DECISIONS = 4
INDEX_BYTES = 4
RECIPES: dict[str, dict[str, Any]] = {
    "lift": {"task": "lift", "policy": "flow", "num_envs": 64},
    "tabletop": {
        "task": "tabletop", "policy": "vla_tiny", "init": "a run of imitation", "algo.critic_warmup": 0, "num_envs": 8,
    },
}  # fmt: skip
STATE: dict[str, Any] = {"task": "lift", "num_envs": 1024, "runtime.max_staleness": 1}
"""Training whose throughput is compared."""
SHORT: dict[str, Any] = {"num_envs": 4, "runtime.decisions": 2, "algo.epochs": 1}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    width: int = 2500
    """Of the five hidden layers of the policy that is broadcast: 100 MB."""
    pullers: int = 8
    """Processes that pull it."""
    envs: int = 128
    """Envs of a batch, with DECISIONS each."""
    rounds: int = 3
    """Rounds that count, see measure.py."""
    training: train.Sizes = field(default_factory=lambda: train.Sizes(warmup=4, iterations=16, rounds=5))
    """Iterations of the trainings whose throughput is compared, and rounds that count."""
    updates: int = 3
    """Updates of a training, whose weights are compared with those before; the first does not count."""


class Puller:
    """Process that pulls weights, as an actor server does."""

    def __init__(self) -> None:
        from embodied.runtime.ray.weights import PulledWeights
        from embodied.runtime.ray.wire import share_tensors

        share_tensors()
        self.store = PulledWeights()

    async def pull(self, publication: Publication) -> float:
        """Pull and check a version; return the seconds."""
        began = time.perf_counter()
        self.store.offer(publication)
        await self.store.pull()
        return time.perf_counter() - began


def measure(short: bool) -> Report:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    tiny = train.Sizes(warmup=1, iterations=1, rounds=1)
    sizes = Sizes(width=64, pullers=2, envs=4, rounds=2, training=tiny, updates=2) if short else Sizes()
    report = Report("ray")
    cluster = Cluster(None)
    try:
        broadcast(report, sizes, cluster.ray)
    finally:
        cluster.close()
    throughput(report, STATE | SHORT if short else STATE, sizes.training)
    for name, recipe in {"lift": RECIPES["lift"] | SHORT}.items() if short else RECIPES.items():
        changes(report, name, recipe, sizes.updates)
    return report


def broadcast(report: Report, sizes: Sizes, ray: Any) -> None:
    """Measure updates with and without a publication before them. ray: the module, connected."""
    from embodied.runtime.ray.weights import Publisher
    from embodied.runtime.ray.wire import nbytes, share_tensors

    share_tensors()
    threads.use(1)  # as the learner has on two cores while other parts compute
    torch.manual_seed(0)
    policy = FlowPolicy(SPEC, FlowConfig(actor_hidden=(sizes.width,) * 5))
    algorithm = PPO(policy, PPOConfig(), seed=0, device=torch.device("cpu"))
    rows = {"state": torch.randn(DECISIONS * sizes.envs, SPEC.state_dim),
            "privileged": torch.randn(DECISIONS * sizes.envs, SPEC.privileged_dim)}  # fmt: skip
    fragment = fragment_of(policy, rows, DECISIONS, torch.Generator().manual_seed(0))
    store, publisher = WeightStore(), Publisher()
    pullers = [ray.remote(Puller).options(num_cpus=0).remote() for _ in range(sizes.pullers)]
    cpu_s: dict[str, list[float]] = {"update": [], "publish": []}
    publish_s: list[float] = []
    pull_s: list[float] = []

    def update() -> None:
        began = time.process_time()
        algorithm.update([fragment], 1)
        cpu_s["update"].append(time.process_time() - began)

    def published() -> float:
        began, began_cpu = time.perf_counter(), time.process_time()
        store.publish(store.version + 1, policy.state_dict())
        publication = publisher.put(store.latest())
        publish_s.append(time.perf_counter() - began)
        cpu_s["publish"].append(time.process_time() - began_cpu)
        pulls = [puller.pull.remote(publication) for puller in pullers]
        update()
        seconds = time.perf_counter() - began
        pull_s.append(max(ray.get(pulls)))
        return seconds

    results = in_turns({"alone": lambda: timed(update), "published": published}, sizes.rounds)
    settings = {"mb": round(nbytes(policy.state_dict()) / 1e6), "pullers": sizes.pullers,
                "decisions": DECISIONS * sizes.envs, "threads": 1, "rounds": sizes.rounds}  # fmt: skip
    for name, seconds in results.items():
        report.add(f"update_{name}", median(seconds), "s", **settings)
    report.add("publish", median(publish_s[1:]), "s", **settings)
    for name, seconds in cpu_s.items():
        report.add(f"{name}_cpu", median(seconds[1:]), "CPU s of the learner's process", **settings)
    report.add("slowest_pull", median(pull_s[1:]), "s", **settings)
    report.ratio("broadcast_share", paired(results["published"], results["alone"]) - 1)
    report.ratio("broadcast_cpu_share", median(cpu_s["publish"][1:]) / median(cpu_s["update"][1:]))


def throughput(report: Report, recipe: Mapping[str, Any], extent: train.Sizes) -> None:
    """Train a recipe from the start on Ray and in threads, in turns."""

    def measure(runtime: str) -> float:
        return train.run({**recipe, "runtime": runtime}, extent).speed

    speeds = in_turns({name: partial(measure, name) for name in ("local", "ray")}, extent.rounds)
    for name, of_rounds in speeds.items():
        settings = train.describe({**recipe, "runtime": name}) | {"iterations": extent.iterations}
        rounded = [round(speed) for speed in of_rounds]
        report.add(f"train_{name}", median(rounded), "control steps/s", **settings, of_rounds=rounded)
    report.ratio("ray_over_local", paired(speeds["ray"], speeds["local"]))


def changes(report: Report, name: str, recipe: Mapping[str, Any], updates: int) -> None:
    """Train a recipe in one thread and compare the weights of each two versions that follow each other."""
    config = compose_run({**recipe, "runtime": "sync", "runtime.eval_every": 0, "eval_episodes": 0})
    versions: list[Weights] = []
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder), new=False) as runtime:
        assert isinstance(runtime, SyncRuntime)
        for iteration in runtime.iterations():
            versions.append(runtime.store.latest())
            if iteration.index > updates:
                break
    pairs = list(pairwise(versions))
    settings = {key: value for key, value in recipe.items() if "." not in key}
    sent = [key for key, since in versions[-1].changed.items() if since == versions[-1].version]
    own = sum(versions[-1].tensors[key].nbytes for key in sent)
    report.add(f"{name}_sent_once", 1 - own / sum(t.nbytes for t in versions[-1].tensors.values()), "of the bytes",
               **settings)  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        found = [Difference.of(*(flat(weights, sent, dtype) for weights in pair)) for pair in pairs]
        label = f"{name}_{str(dtype).removeprefix('torch.')}"
        report.add(f"{label}_changed", median(d.changed for d in found), "of the elements", **settings)
        report.add(f"{label}_index_value", median(d.index_value for d in found), "of the bytes", **settings)
        report.add(f"{label}_xor", median(d.xor for d in found), "of the bytes", **settings)
        report.add(f"{label}_xor_speed", median(d.mb_per_s for d in found), "MB/s", **settings)


def flat(weights: Weights, names: list[str], dtype: torch.dtype) -> Tensor:
    """Return the floating point tensors of these names in one row, rounded to ``dtype``."""
    tensors = (weights.tensors[name] for name in names)
    return torch.cat([tensor.flatten().to(dtype) for tensor in tensors if tensor.is_floating_point()])


@dataclass(frozen=True, slots=True)
class Difference:
    """Size of the difference between two versions."""

    changed: float
    """Share of the elements whose bits differ."""
    index_value: float
    """Bytes of their positions and values, over those of all values."""
    xor: float
    """Bytes of the compressed XOR, over those of all values."""
    mb_per_s: float
    """Values of which the XOR was computed and compressed, MB per second."""

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> Difference:
        """Compare two rows of the same size and type."""
        size = before.element_size()
        bits = {2: torch.int16, 4: torch.int32}[size]
        began = time.perf_counter()
        xor = before.view(bits) ^ after.view(bits)
        planes = xor.view(torch.uint8).view(-1, size).T.contiguous()
        compressed = len(zlib.compress(planes.numpy().tobytes(), level=1))
        speed = before.nbytes / 1e6 / (time.perf_counter() - began)
        changed = float((xor != 0).double().mean())
        return cls(changed, changed * (INDEX_BYTES + size) / size, compressed / before.nbytes, speed)
