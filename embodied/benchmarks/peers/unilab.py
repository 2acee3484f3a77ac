"""Asynchronous PPO of UniLab (``unilab-rl``) on our environments, run by the Python of its own environment.

    compare.train ─► this file: UniLab's runner and learner ─► its collector, a process that steps ``Collected``
                     counts what it learns in ``learned``      has the meter, writes its marks to a file and exits

The collector never waits. The learner trains on the latest rollouts, of which it may repeat or miss some.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied.benchmarks.peers.meter import Finished, Mark, Meter, PPOSettings, rsl_rl_settings
from embodied.benchmarks.peers.own import interpreter
from embodied.core.options import from_mapping
from embodied.core.types import Obs
from embodied.runtime import threads

if TYPE_CHECKING:
    from embodied.benchmarks.peers.compare import CompareOptions

MARKS = "marks.json"
OWN = {
    "num_envs": 2048, "decisions": 24, "hidden": (512, 256, 128), "learning_rate": 1e-3, "value_coef": 1.0,
    "entropy_coef": 0.01, "max_grad_norm": 1.0,
}  # fmt: skip
"""What UniLab sets itself (unilab/conf/appo/config.yaml of unilab 1.5.2) and ``PPOSettings`` does not."""


def train(options: "CompareOptions", meter: Meter, own: bool) -> None:
    """Train in a process of UniLab's environment until the meter's limits. own: with UniLab's own settings."""
    ppo = replace(options.ppo, **OWN) if own else options.ppo
    limits = {name: getattr(meter, name) for name in ("iterations", "env_steps", "level")}
    request = {"options": asdict(replace(options, ppo=ppo)), "limits": limits, "own": own}
    with TemporaryDirectory() as folder:
        command = [interpreter("unilab-rl"), "-m", __name__, json.dumps(request), folder]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        marks = Path(folder) / MARKS
        if not marks.exists():
            raise RuntimeError(f"UniLab ended: {done.stderr[-2000:]}")
        meter.marks = [Mark(**mark) for mark in json.loads(marks.read_text(encoding="utf-8"))]


# ------------------------------------------------------------------------------------------ in the learner's process
def main(request: Mapping[str, Any], folder: Path) -> None:
    from uni_rl.algos.appo.runner import APPORunner

    from embodied.benchmarks.peers.compare import CompareOptions

    options: CompareOptions = from_mapping(CompareOptions, request["options"])
    num_threads = options.threads or max(1, threads.torch_cores() // 2)
    threads.use(num_threads)
    learned = get_context("spawn").Array("q", 2)  # gradient updates and samples in them

    class Runner(APPORunner):
        def _build_learner(self) -> Any:
            learner = super()._build_learner()
            update = learner.update

            def counted(batch: dict[str, Tensor]) -> Any:
                found, steps = update(batch), learner.num_learning_epochs * learner.num_mini_batches
                rows = batch["observations"].shape[:2].numel() // learner.num_mini_batches
                learned[0] += steps
                learned[1] += steps * rows
                return found

            learner.update = counted
            return learner

    ppo = options.ppo
    runner = Runner(
        options.task, {}, settings(ppo, request["own"]), seed=ppo.seed, device="cpu", num_envs=ppo.num_envs,
        steps_per_env=ppo.decisions, env_factory=partial(Collected, options, request["limits"], num_threads, learned, folder),
    )  # fmt: skip
    with suppress(RuntimeError):  # the collector is gone
        runner.learn(10**9, save_interval=0, log_dir=str(folder), logger_type="no_print")
    runner.close()


def settings(ppo: PPOSettings, own: bool) -> dict[str, Any]:
    """Return UniLab's configuration of the networks and of PPO."""
    found = rsl_rl_settings(ppo)
    if own:
        for part in ("actor", "critic"):
            found[part] |= {"activation": "elu", "obs_normalization": False}
        found["actor"]["distribution_cfg"] |= {"init_std": 1.0}
        found["algorithm"] |= {"use_clipped_value_loss": True, "schedule": "adaptive", "desired_kl": 0.01}
    return found


# ---------------------------------------------------------------------------------------- in the collector's process
class Collected:
    """The environments, as UniLab's collector steps them. UniLab builds one more to ask it for its sizes.

    Version 1.4.15 leaves the last observations of a rollout, from which it bootstraps, at zero; here they are filled.
    """

    def __init__(
        self, options: "CompareOptions", limits: Mapping[str, float], num_threads: int, learned: Any, folder: Path,
        num_envs: int, overrides: object,
    ) -> None:  # fmt: skip
        from embodied.benchmarks.peers.compare import spec_of

        self.options, self.num_envs, self.device, self.folder = options, num_envs, torch.device("cpu"), folder
        spec = spec_of(options)
        self.meter, self.num_threads = Meter(spec, **limits), num_threads
        self.meter.learned, self.meter.cpu_s = learned, cpu_s
        self.obs_groups_spec = {name: spec.state_dim for name in ("obs", "critic")}
        self.action_space = SimpleNamespace(shape=(spec.action_dim,))

    def reset(self, ids: object) -> tuple[Obs, dict[str, Any]]:
        from uni_rl.ipc import TensorRolloutRingBuffer

        from embodied.benchmarks.peers.compare import peer_stepper

        threads.use(self.num_threads)
        self.stepper, written = peer_stepper(self.options, self.meter), TensorRolloutRingBuffer.signal_write_done
        self.state = self.stepper.reset()["state"]

        def filled(ring: Any) -> None:
            for name in ("last_obs", "last_critic"):
                ring.write_buffer[name].copy_(self.state)
            written(ring)

        TensorRolloutRingBuffer.signal_write_done = filled
        return both(self.state), {}

    def step(self, action_NA: Tensor) -> SimpleNamespace:
        try:
            step = self.stepper.step(action_NA)
        except Finished:
            marks = [asdict(mark) for mark in self.meter.marks]
            (self.folder / MARKS).write_text(json.dumps(marks), encoding="utf-8")
            sys.exit()
        self.state, last = step.obs["state"], step.obs["state"]
        if len(step.final_ids):
            last = last.index_copy(0, step.final_ids, step.final_obs["state"])
        return SimpleNamespace(
            obs=both(self.state), reward=step.reward_N, terminated=step.terminated_N, truncated=step.truncated_N,
            info={}, final_observation=both(last),
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: the process ends."""


def both(state_NS: Tensor) -> Obs:
    """Return the observations of UniLab's actor and critic."""
    return {"obs": state_NS, "critic": state_NS}


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its parent, the learner: Linux numbers their clocks so."""
    return time.process_time() + time.clock_gettime(~os.getppid() << 3 | 2)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
