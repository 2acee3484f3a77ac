"""What an adapter costs: its speed over that of the bare simulator, stepped through the simulator's own interface.

    envpool_adapter_over_bare    control steps/s of task=envpool/HalfCheetah-v5 / EnvPool's own ``step``, 64 envs each

Both loops have the same actions, threads and number of envs. Ours also clips and checks actions, counts episodes,
resets in the step in which an episode ends, and keeps the last observations.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch

from embodied.benchmarks.measure import Report, in_turns, note, paired, timed
from embodied.runtime import threads
from envs import FAMILIES
from envs.common.sampler import SamplerSetup, UniformConfig, UniformSampler

ENVPOOL_ID = "HalfCheetah-v5"


def against_envpool(report: Report, short: bool) -> None:
    """Add ``envpool_adapter_over_bare`` and its speeds, if EnvPool is installed."""
    if find_spec("envpool") is None:
        note("envpool is not installed: left out (pip install -c constraints.txt -e '.[envpool]')")
        return
    import envpool

    num_envs, steps, rounds = (4, 4, 2) if short else (64, 100, 25)
    cores = threads.available_cores()
    family = FAMILIES["envpool"].build()
    task = family.task_config(ENVPOOL_ID)()
    env = family.make(ENVPOOL_ID, task, num_envs=num_envs, num_threads=cores, sim=None)
    env.reset(UniformSampler(env.spec, UniformConfig(), SamplerSetup(num_envs, stagger=True)))
    bare = envpool.make_gymnasium(ENVPOOL_ID, num_envs=num_envs, num_threads=cores, seed=0)
    bare.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, num_envs, env.spec.action_dim)).astype(np.float32)
    ours = torch.from_numpy(actions)

    def adapted_loop() -> None:
        for action in ours:
            env.step(action)

    def bare_loop() -> None:
        for action in actions:
            bare.step(action)

    count = num_envs * steps
    loops = {"adapted": lambda: count / timed(adapted_loop), "bare": lambda: count / timed(bare_loop)}
    results = in_turns(loops, rounds)
    settings = {
        "task": ENVPOOL_ID, "num_envs": num_envs, "num_threads": cores, "control_steps": steps, "rounds": rounds,
    }  # fmt: skip
    for name, speeds in results.items():
        report.add(f"envpool_{name}", float(np.median(speeds)), "control steps/s", **settings)
    report.ratio("envpool_adapter_over_bare", paired(results["adapted"], results["bare"]))
    env.close()
    bare.close()
