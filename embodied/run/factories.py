"""The parts that a run's configuration names: environments, policy, algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from algos import ALGORITHMS
from embodied.core.config import from_mapping
from embodied.core.protocols import Algorithm, Policy
from embodied.core.types import TRAIN, EnvSpec
from embodied.run.config import RunConfig, options_of
from envs import MujocoPool, make_pool
from envs.rendering.cameras import Camera
from envs.rendering.vision import find_camera
from policies import POLICIES


def make_spec(config: RunConfig) -> EnvSpec:
    """Describe the run's environments."""
    env = make_env(config, num_envs=1, num_threads=1)
    env.close()
    return env.spec


def make_env(
    config: RunConfig,
    num_envs: int,
    num_threads: int,
    training: bool = False,
    run_dir: Path = Path(),
    splits: Sequence[str] | None = None,
    cameras: Sequence[Camera] | None = None,
) -> MujocoPool:
    """The run's task. Training envs have staggered episodes, and the task's share of them start with the object held;
    for an algorithm with a group_size so many neighbours have the same episodes instead, all in step.

    run_dir: what the simulator's ``dump_dir`` is relative to. splits: of the task's instructions, those that episodes
    come from, in turn; None is all, and for training ``train``. cameras: None is those of the policy.
    """
    sim = options_of(config.sim)
    group_size = config.group_size if training else 1
    return make_pool(
        config.task["name"],
        options_of(config.task),
        num_envs=num_envs,
        num_threads=num_threads,
        seed=config.seed,
        sim={**sim, "dump_dir": str(run_dir / sim["dump_dir"])},
        stagger=training and group_size == 1,
        held_starts=config.task["held_starts"] if training else 0.0,
        group_size=group_size,
        splits=(TRAIN,) if training and splits is None else splits,
        cameras=cameras_of(config) if cameras is None else cameras,
    )


def cameras_of(config: RunConfig) -> list[Camera]:
    """What the policy sees, at the size that it takes; nothing for one that gets a state vector alone."""
    return square_cameras(config.policy.get("cameras", ()), config.policy.get("image_size", 0))


def square_cameras(names: Sequence[str], size: int) -> list[Camera]:
    """The cameras of these names, ``size`` pixels wide and high. UserError for an unknown one."""
    return [replace(find_camera(name), width=size, height=size) for name in names]


def make_policy(config: RunConfig, spec: EnvSpec) -> Policy:
    entry = POLICIES[config.policy["name"]]
    return entry.build(spec, from_mapping(entry.config, options_of(config.policy), "policy"))


def make_algorithm(config: RunConfig, policy: Policy) -> Algorithm:
    """The run's algorithm, on the device that the policy is on."""
    assert isinstance(policy, nn.Module)
    device = next(policy.parameters()).device
    entry = ALGORITHMS[config.algo["name"]]
    options = from_mapping(entry.config, options_of(config.algo), "algo")
    return entry.build(policy, options, seed=config.seed, device=device)
