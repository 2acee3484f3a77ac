"""Asynchronous PPO of UniLab (``unilab-rl``) on our environments, run by the Python of its own environment.

    compare.train ─► this file: UniLab's runner and learner ─► its collector, a process that steps ``Collected``
                     counts its updates in ``updates``         has the meter; writes the marks to a file and exits

The collector never waits. The learner takes the latest rollouts, of which it may miss some, or use some again.
"""

import io
import json
import os
import sys
import time
from collections.abc import MutableSequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from uni_rl.algos.appo.runner import APPORunner
from uni_rl.ipc import TensorRolloutRingBuffer

from embodied.benchmarks.peers.compare import CompareOptions, peer_stepper, spec_of
from embodied.benchmarks.peers.meter import Finished, Meter, rsl_rl_settings
from embodied.core.options import from_mapping
from embodied.core.types import Obs
from embodied.envs.views.isaac_gym import critic_state
from embodied.runtime import threads


def train(options: CompareOptions, limits: dict[str, float], own: bool) -> list[dict[str, Any]]:
    """Train until the limits of a ``Meter``; return its marks. own: what ``PPOSettings`` lacks is as UniLab sets it."""
    ppo, num_threads = options.ppo, options.threads or max(1, threads.torch_cores() // 2)
    threads.use(num_threads)
    config = rsl_rl_settings(ppo)
    if own:
        for part in ("actor", "critic"):
            config[part] |= {"activation": "elu", "obs_normalization": False}
        config["actor"]["distribution_cfg"] |= {"init_std": 1.0}
        config["algorithm"] |= {"use_clipped_value_loss": True, "schedule": "adaptive", "desired_kl": 0.01}
    updates: Any = get_context("spawn").Array("q", 1)
    with TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        runner = APPORunner(
            options.task, {}, config, seed=ppo.seed, device="cpu", num_envs=ppo.num_envs, steps_per_env=ppo.decisions,
            replay_queue_size=3 if own else 1,  # rollouts in a batch
            env_factory=partial(Collected, options, limits, num_threads, updates, marks),
        )  # fmt: skip
        with Meter(spec_of(options), updates=updates).counting(), suppress(RuntimeError):  # the collector is gone
            runner.learn(10**9, save_interval=0, log_dir=folder, logger_type="no_print")
        runner.close()
        found: list[dict[str, Any]] = json.loads(marks.read_text(encoding="utf-8"))
    return found


class Collected:
    """The environments, as UniLab's collector steps them. UniLab builds one more to ask it for its sizes.

    Version 1.4.15 leaves the last observations of a rollout, from which it bootstraps, at zero; here they are filled.
    """

    def __init__(
        self, options: CompareOptions, limits: dict[str, float], num_threads: int, updates: MutableSequence[int],
        marks: Path, num_envs: int, overrides: object,
    ) -> None:  # fmt: skip
        spec = spec_of(options)
        self.options, self.num_threads, self.marks = options, num_threads, marks
        self.meter = Meter(spec, **limits, updates=updates, cpu_s=cpu_s)
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.obs_groups_spec = {"obs": spec.state_dim, "critic": spec.state_dim + spec.privileged_dim}
        self.action_space = SimpleNamespace(shape=(spec.action_dim,))

    def reset(self, ids: object) -> tuple[Obs, dict[str, Any]]:
        threads.use(self.num_threads)
        self.stepper = peer_stepper(self.options, self.meter)
        self.seen = of_both(self.stepper.reset())
        written = TensorRolloutRingBuffer.signal_write_done

        def filled(ring: Any) -> None:
            for name, seen in self.seen.items():
                ring.write_buffer[f"last_{name}"].copy_(seen)
            written(ring)

        TensorRolloutRingBuffer.signal_write_done = filled
        return self.seen, {}

    def step(self, action_NA: Tensor) -> SimpleNamespace:
        try:
            step = self.stepper.step(action_NA)
        except Finished:
            self.marks.write_text(json.dumps([asdict(mark) for mark in self.meter.marks]), encoding="utf-8")
            sys.exit()
        self.seen = last = of_both(step.obs)
        if len(step.final_ids):
            final = of_both(step.final_obs)
            last = {name: seen.index_copy(0, step.final_ids, final[name]) for name, seen in last.items()}
        return SimpleNamespace(
            obs=self.seen, reward=step.reward_N, terminated=step.terminated_N, truncated=step.truncated_N, info={},
            final_observation=last,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing: the process ends."""


def of_both(obs: Obs) -> Obs:
    """Return the observations of UniLab's actor and critic, which sees what ours sees."""
    return {"obs": obs["state"], "critic": critic_state(obs)}


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its parent, the learner: Linux numbers their clocks so."""
    return time.process_time() + time.clock_gettime(~os.getppid() << 3 | 2)


if __name__ == "__main__":
    request, said = json.loads(sys.argv[1]), io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        marks = train(from_mapping(CompareOptions, request["options"]), request["limits"], request["own"])
    print(json.dumps(marks))
