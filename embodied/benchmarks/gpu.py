"""One GPU, or a CPU with ``short=true``: what the card can do, and what pool, training and π0 take of it.

    floors    copy_gb_s, product_tflop_s (bfloat16 matrices): what the card can do
    pool      warp_pool_over_kernels_<n>: pool of sim=warp / its recorded kernels alone, by number of envs
    solve     seconds from the first step until an evaluation has 90% and 98% success: sim=warp, and sim=mujoco on CPU
    train     training of pick_place, env steps/s: sim=warp by number of envs, and sim=mujoco on GPU and CPU
    lora      the same as in pi0 of an update of π0 with LoRA and small minibatches
    threads   pool of sim=mujoco / its bare engine, by number of threads; training by number of cores and envs
    pi0       π0 of the published size, its expert in bfloat16 and tfloat32: decisions/s of ``act`` by batch; how far
              the log-probability moves with the batch size; update of the recipe ``vla-ppo`` as a share of
              product_tflop_s (counted: the prefix once, forward and backward pass of what is trained); peak memory
    cameras   sim=warp with two cameras of 64 x 64 pixels, by number of envs: share of the pixels that sim=mujoco paints
              otherwise (by more than 8 of 255), images/s, and control steps/s with the images of every chunk

The parts are in the order of importance. Each runs in a process of its own for at most its time, LIMITS_S, because a
card may be at hand for minutes only; what a part has measured by then stays, and goes to ``out=`` at once.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from mujoco.batch import Batch
from torch.utils.flop_counter import FlopCounterMode

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.benchmarks.measure import Report, note, paired, timed, trained
from embodied.benchmarks.sim import CHUNK, TASK, Replay, against_engine, against_warp
from embodied.core.device import resolve_device
from embodied.core.episodes import EpisodeStats
from embodied.core.execution import obs_to
from embodied.core.graphs import Recorded
from embodied.core.options import config_dataclass
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.core.types import Fragment, Obs
from embodied.envs import TASKS, make_pool, make_sampler
from embodied.envs.mujoco.config import WarpConfig
from embodied.envs.mujoco.warp.pool import WarpPool
from embodied.runtime import threads
from embodied.session.config import compose_run
from embodied.session.defaults import compose_new
from embodied.session.factories import make_policy, make_spec
from embodied.trainers.reinforcement import build

Part = Literal["floors", "pool", "solve", "train", "lora", "threads", "pi0", "cameras"]
LIMITS_S = {
    "floors": 15, "pool": 50, "solve": 150, "train": 40, "lora": 50, "threads": 45, "pi0": 120, "cameras": 25,
}  # fmt: skip
"""Together 8 minutes."""
PRODUCT = {True: (256, 2), False: (8192, 20)}  # size of the matrices and rounds, by ``short``
SHORT_LIMIT_S = 300  # of any part on a CPU, where Warp compiles its kernels


@config_dataclass
class GpuOptions:
    """Options after ``bench gpu``."""

    parts: tuple[Part, ...] = get_args(Part)
    """Parts to run, in this order."""


def measure(report: Report, short: bool, options: GpuOptions) -> None:
    """Run the parts, each in a process of its own, which adds its numbers to the file of the report.

    short: tiny sizes. UserError without a CUDA device, unless ``short``.
    """
    device = resolve_device("auto" if short else "cuda")
    with TemporaryDirectory() as folder:
        path = report.out or Path(folder) / "gpu.json"
        for part in options.parts:
            note(f"--- {part}")
            command = [sys.executable, "-m", "embodied.benchmarks.gpu", part, str(device), str(int(short)), str(path)]
            try:
                limit_s = SHORT_LIMIT_S if short else LIMITS_S[part]
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=limit_s)
            except subprocess.TimeoutExpired:
                note(f"{part} did not finish: its time was over")
            except subprocess.CalledProcessError:
                note(f"{part} did not finish: see above")
        report.read(path)


# ---------------------------------------------------------------------------------------------------------- in a part
def run_part(part: str, device: torch.device, short: bool, path: Path) -> None:
    """Run one part, and add its numbers to those in a file."""
    threads.use(1)  # what is measured on a CPU has threads of its own
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report = Report("gpu", path, common={"device": name})
    report.read(path)
    PARTS[part](report, device, short)


def floors(report: Report, device: torch.device, short: bool) -> None:
    size, rounds = PRODUCT[short]
    source = torch.zeros(size * size * 16, dtype=torch.uint8, device=device)
    copied_s = timed_on(device, source.clone, rounds)
    report.add("copy_gb_s", 2 * source.numel() / copied_s / 1e9, "GB/s", bytes=source.numel())
    report.add("product_tflop_s", product_tflop_s(device, size, rounds), "TFLOP/s", size=size, dtype="bfloat16")


def product_tflop_s(device: torch.device, size: int, rounds: int) -> float:
    """Return the speed of a product of two bfloat16 matrices; a multiply-add is two operations."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / timed_on(device, lambda: a @ b, rounds) / 1e12


def pool(report: Report, device: torch.device, short: bool) -> None:
    for num_envs in (2,) if short else (4096, 16384, 1024):
        count = 2 if short else 64
        against_warp(report, f"warp_pool_over_kernels_{num_envs}", num_envs, 3, count, CHUNK, str(device))


def solve(report: Report, device: torch.device, short: bool) -> None:
    tiny = {"num_envs": 8, "runtime.decisions": 2, "runtime.eval_episodes": 2} if short else {}
    runs: dict[str, dict[str, Any]] = {"mujoco": {"device": "cpu", "runtime.eval_every": 20, **tiny}}
    if not short:
        runs = {"warp": {"sim": "warp", "device": str(device), "runtime.eval_every": 5}, **runs}
    seconds: dict[str, float] = {}
    for name, words in runs.items():
        words = {"task": TASK, "runtime.eval_episodes": 200, **words}
        config = compose_new(words)
        with TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
            began_s, levels = time.monotonic(), [0.9, 0.98]
            for iteration in runtime.iterations(64 if short else math.inf):
                success = (iteration.evaluation or {}).get("success_at_end", 0.0)
                while levels and success >= levels[0]:
                    level, seconds[name] = levels.pop(0), time.monotonic() - began_s
                    report.add(f"{name}_s_to_{level:.0%}", seconds[name], "s", env_steps=iteration.env_steps, **words)
                if not levels:
                    break
    if len(seconds) == 2:
        report.ratio("warp_sooner_than_mujoco", seconds["mujoco"] / seconds["warp"])


def train(report: Report, device: torch.device, short: bool) -> None:
    runs: list[tuple[str, dict[str, Any]]]
    runs = [(f"warp_{n}", {"sim": "warp", "device": str(device), "num_envs": n}) for n in (4096, 16384)]
    runs += [("warp_4096_sync", runs[0][1] | {"runtime": "sync"})]
    runs += [("mujoco_gpu", {"device": str(device)}), ("mujoco_cpu", {"device": "cpu"})]
    for name, words in [("warp_2", {"sim": "warp", "num_envs": 2, "device": "cpu"})] if short else runs:
        train_with(report, name, words, short)


def train_with(report: Report, name: str, words: Mapping[str, Any], short: bool) -> None:
    """Add the speed of a training, and the seconds of its parts in an iteration."""
    own = {"runtime.decisions": 4, "algo.num_minibatches": 4} if words.get("sim") == "warp" else {}
    config = compose_new({"task": TASK, "runtime.eval_every": 0, **own, **words})
    with TemporaryDirectory() as folder, build(config, Path(folder)) as runtime:
        steps, seconds, metrics = trained(runtime, *((1, 1) if short else (3, 10)))
    report.add(f"train_{name}", steps / seconds, "env steps/s", **words)
    for key in ("perf/sim_s", "perf/infer_s", "perf/learn_s", "perf/wait_s"):
        report.add(f"train_{name}_{key[5:]}", median(row[key] for row in metrics), "s/iteration", **words)


def pi0(report: Report, device: torch.device, short: bool) -> None:
    base: dict[str, Any] = {"task": "tabletop", "policy": "pi0_size", "device": str(device)}
    if short:
        base |= {"policy": "vla_tiny", "algo.epochs": 1}
    for dtype in ("bfloat16", "tfloat32"):  # in this order: tfloat32 holds for the whole process
        words = base | {"policy.expert_dtype": dtype}
        policy = build_pi0(words, device)
        report.add("pi0_parameters", sum(weight.numel() for weight in policy.parameters()), "parameters", **words)
        act = Recorded(partial(vars_of_act, policy), device, policy)  # as the actor server does
        for rows in (1, 4) if short else (1, 16, 64):
            obs, noise = observed(policy, rows, device), torch.randn(rows, *policy.noise_shape, device=device)
            with torch.no_grad():
                act_s = timed_on(device, partial(act, obs, noise), 2 if short else 10)
            report.add(f"pi0_{dtype}_act_{rows}", rows / act_s, "decisions/s", ms=round(1e3 * act_s, 2), **words)
        precision(report, f"pi0_{dtype}", policy, observed(policy, 8 if short else 64, device), device)
        del act
        update(report, f"pi0_{dtype}", policy, words, device, short)


def lora(report: Report, device: torch.device, short: bool) -> None:
    words: dict[str, Any] = {"task": "tabletop", "policy": "vla_tiny" if short else "pi0_size", "device": str(device)}
    words |= {"policy.lora_rank": 16, "num_envs": 64, "algo.num_minibatches": 4 if short else 16}
    update(report, "pi0_lora", build_pi0(words, device), words, device, short)


def build_pi0(words: Mapping[str, Any], device: torch.device) -> Any:
    config = compose_run(words)
    torch.manual_seed(0)
    with device:  # to draw 2.7 billion numbers takes half a minute on a CPU
        return make_policy(config, make_spec(config)).to(device).eval()


def observed(policy: Any, rows: int, device: torch.device) -> Obs:
    """Return random observations of the policy's task."""
    spec: EnvSpec = policy.spec
    obs = {f"images.{c.name}": torch.randint(256, (rows, c.height, c.width, 3)).byte() for c in spec.cameras}
    obs |= {"state": torch.randn(rows, spec.state_dim), "privileged": torch.randn(rows, spec.privileged_dim)}
    return obs_to(obs | {"instruction": torch.arange(rows) % len(spec.instructions)}, device)


@torch.no_grad()
def random_fragment(policy: Any, steps: int, num_envs: int, device: torch.device) -> Fragment:
    """Return decisions on random observations, the same ones in every step: an update costs the same."""
    obs = observed(policy, num_envs, device)
    obs = policy.precompute(obs) if policy.precompute_in_actor else obs
    sample = policy.act(obs, torch.randn(num_envs, *policy.noise_shape, device=device))
    shape, none = (steps, num_envs), torch.zeros(steps, num_envs)

    def repeated(value: torch.Tensor) -> torch.Tensor:
        return value.cpu().unsqueeze(0).expand(steps, *value.shape).contiguous()

    return Fragment(
        obs={key: repeated(value) for key, value in obs.items()},
        chain=repeated(sample.chain), log_prob_TN=repeated(sample.log_prob_N), value_TN=repeated(sample.value_N),
        reward_TNE=torch.randn(*shape, policy.execute), num_steps_TN=torch.full(shape, policy.execute),
        terminated_TN=none.bool(), truncated_TN=none.bool(), final_value_TN=none, bootstrap_value_N=none[0],
        version_TN=none.long(), episodes=EpisodeStats.concatenate([]),
        action_TNEA=repeated(sample.action_NHA[:, : policy.execute]),
    )  # fmt: skip


def update(report: Report, name: str, policy: Any, words: Mapping[str, Any], device: torch.device, short: bool) -> None:
    """Add the speed of updates on as many decisions as the recipe has, and the peak memory with a checkpoint."""
    config = compose_run(words)
    algo: PPOConfig = replace(config.algo.options, critic_warmup=0)  # the actor learns, too
    decisions = 8 if short else config.num_envs * config.runtime.decisions
    rows = min(decisions, 64)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    fragment = random_fragment(policy, decisions // rows, rows, device)
    algorithm = PPO(policy, algo, seed=0, device=device)
    update_s = timed_on(device, lambda: algorithm.update([fragment], 0), 1 if short else 2, warm_up=1)
    algorithm.state_dict()  # as for a checkpoint
    if device.type == "cuda":
        report.add(f"{name}_peak_gb", torch.cuda.max_memory_allocated(device) / 1e9, "GB", **words)
    report.add(f"{name}_update", decisions / update_s, "decisions/s", decisions=decisions, epochs=algo.epochs, **words)

    batch = algorithm.prepare(fragment, fragment.version_TN, fragment.num_steps_TN > 0)
    minibatch = batch.select(torch.arange(decisions // algo.num_minibatches, device=device))
    with FlopCounterMode(display=False) as prefix:
        policy.precompute(observed(policy, rows, device))
    with FlopCounterMode(display=False) as step:
        algorithm.loss(minibatch).total.backward()
    flops = decisions // rows * prefix.get_total_flops() + algo.epochs * algo.num_minibatches * step.get_total_flops()
    report.add(f"{name}_update_tflop_s", flops / update_s / 1e12, "TFLOP/s", decisions=decisions, **words)
    report.ratio(f"{name}_update_over_product", flops / update_s / 1e12 / product_tflop_s(device, *PRODUCT[short]))


def vars_of_act(policy: Any, obs: Obs, noise: torch.Tensor) -> list[torch.Tensor]:
    sample = policy.act(obs, noise)
    return [sample.action_NHA, sample.log_prob_N, sample.value_N, sample.chain]


@torch.no_grad()
def precision(report: Report, name: str, policy: Any, obs: Obs, device: torch.device) -> None:
    """Add how far ratios of recorded decisions are from 1 with the same weights, at several batch sizes."""
    num = len(obs["state"])
    sample = policy.act(obs, torch.randn(num, *policy.noise_shape, device=device))
    for rows in (num // 4, 4, 1):
        parts = [slice(first, first + rows) for first in range(0, num, rows)]
        again = [policy.evaluate({k: v[part] for k, v in obs.items()}, sample.chain[part]).log_prob_B for part in parts]
        log_ratio_N = torch.cat(again) - sample.log_prob_N
        report.add(f"{name}_log_ratio_99_{rows}", float(log_ratio_N.abs().quantile(0.99)), "nats", batch=rows)
        report.add(f"{name}_mean_ratio_{rows}", float(log_ratio_N.exp().mean()), "", batch=rows)


def cameras(report: Report, device: torch.device, short: bool) -> None:
    task, size = TASKS[TASK], {"side": 64, "cameras": 2}
    specs = [CameraSpec.square(name, size["side"]) for name in ("front", "wrist")]
    for num_envs in (2,) if short else (4096, 1024):
        sim = WarpConfig(device=str(device))
        pool = WarpPool(task.build(task.config()), num_envs=num_envs, sim=sim, cameras=specs)
        seen = pool.reset(make_sampler(pool, stagger=True))
        on_cpu = make_pool(TASK, {}, num_envs=num_envs, cameras=specs)
        for key, expected in on_cpu.reset(make_sampler(on_cpu, stagger=True)).items():
            if key.startswith("images."):
                off = (seen[key].cpu().int() - expected.int()).abs().amax(-1) > 8
                report.add(f"camera_pixels_off_{key[7:]}_{num_envs}", float(off.float().mean()), "share", **size)
        still, rounds = torch.zeros(num_envs, CHUNK, pool.spec.action_dim, device=device), 2 if short else 10
        painted_s, stepped_s = (
            timed_on(device, pool.observe, rounds),
            timed_on(device, partial(pool.step, still), rounds),
        )
        report.add(f"camera_images_{num_envs}", 2 * num_envs / painted_s, "images/s", **size)
        report.add(f"camera_steps_{num_envs}", CHUNK * num_envs / stepped_s, "control steps/s", chunk=CHUNK, **size)


def threads_part(report: Report, device: torch.device, short: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    counts = [2**i for i in range(len(cores).bit_length()) if 2**i < len(cores)] + [len(cores)]
    sizes = [(8, counts)] if short else [(1024, counts), (4096, counts[-1:])]
    for num_envs, num_threads in [(num_envs, n) for num_envs, some in sizes for n in some]:
        envs = make_pool(TASK, {}, num_envs=num_envs, num_threads=num_threads)
        envs.reset(make_sampler(envs, stagger=True))
        replay = Replay(envs, CHUNK if short else 2 * CHUNK, CHUNK)
        engine = Batch(envs.task.scene().compile(), num_envs, num_threads)
        found = against_engine(report, replay, {"engine": engine}, 3)
        ratio = paired(found["pool"], found["engine"])
        report.ratio(f"pool_over_engine_{num_envs}_threads_{num_threads}", ratio)
    for num_cores in sorted({min(2, len(cores)), len(cores)}):
        os.sched_setaffinity(0, cores[:num_cores])
        for num_envs in (8,) if short else (256, 1024, 2048):
            for learner in sorted({1, min(4, num_cores)}):
                words = {"device": "cpu", "num_envs": num_envs, "runtime.learner_threads": learner}
                words |= {"runtime.decisions": 2} if short else {}
                train_with(report, f"{num_envs}_cores_{num_cores}_learner_{learner}", words, short)
    os.sched_setaffinity(0, cores)


PARTS: Mapping[str, Callable[[Report, torch.device, bool], None]] = {
    "floors": floors, "pool": pool, "solve": solve, "train": train, "lora": lora, "threads": threads_part, "pi0": pi0,
    "cameras": cameras,
}  # fmt: skip


def timed_on(device: torch.device, work: Callable[[], object], rounds: int, warm_up: int = 2) -> float:
    """Return the median seconds of ``work``, with what it started on the device."""

    def once() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return median([timed(once) for _ in range(warm_up + rounds)][warm_up:])


if __name__ == "__main__":
    run_part(sys.argv[1], torch.device(sys.argv[2]), bool(int(sys.argv[3])), Path(sys.argv[4]))
