"""The parts that a configuration names: environments, samplers, policy, algorithm; load and evaluate a policy."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from math import floor
from pathlib import Path
from typing import Any

import torch

from embodied.algos import ALGORITHMS
from embodied.core.device import resolve_device
from embodied.core.env import VecEnv
from embodied.core.episodes import EpisodePlans, EpisodeSampler
from embodied.core.errors import UserError, check_base, unknown_name
from embodied.core.policy import Policy
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import TRAIN, CameraSpec, EnvSpec
from embodied.envs import SAMPLERS, SamplerSetup
from embodied.envs.base.delayed import DelayedEnv
from embodied.envs.episodes.sampler import first_episodes
from embodied.envs.registry import FAMILIES, split_name
from embodied.policies import POLICIES
from embodied.runtime import checkpoint, threads
from embodied.runtime.checkpoint_names import newest_first
from embodied.runtime.config import EvalNoise
from embodied.runtime.evaluator import MAX_EVAL_ENVS, evaluate
from embodied.runtime.recipe import device_of
from embodied.session.config import RunConfig, read_section, with_architecture
from embodied.session.interface import check_interface


def make_spec(config: RunConfig, cameras: Sequence[CameraSpec] | None = None) -> EnvSpec:
    """Return the spec of the run's environments, without building one. cameras: None is those of the policy."""
    family, id = split_name(config.task.name)
    seen = config.policy.options.observed_cameras if cameras is None else cameras
    return FAMILIES[family].build().spec(id, config.task.options, seen)


def make_env(
    config: RunConfig,
    num_envs: int,
    num_threads: int,
    run_dir: Path = Path(),
    cameras: Sequence[CameraSpec] | None = None,
) -> VecEnv:
    """Build environments of the run's task. UserError if they are not as their family describes them.

    run_dir: base of the simulator's ``dump_dir``, if it has one. A simulator with a device has that of the learner
    unless ``sim.device`` names another one. cameras: None is those of the policy.
    """
    family, id = split_name(config.task.name)
    sim = config.sim.options
    if hasattr(sim, "dump_dir"):
        sim = replace(sim, dump_dir=str(run_dir / sim.dump_dir))
    if getattr(sim, "device", None) == "auto":
        sim = replace(sim, device=str(acting_device(config)))
    spec = make_spec(config, cameras)
    make = FAMILIES[family].build().make
    options = config.task.options
    env = make(id, options, num_envs=num_envs, num_threads=num_threads, sim=sim, cameras=spec.cameras)
    check_base(env, VecEnv, f"task={config.task.name}")
    differ = [field.name for field in fields(spec) if getattr(spec, field.name) != getattr(env.spec, field.name)]
    if differ:
        env.close()
        raise UserError(
            f"environment '{env.spec.task}' breaks the contract of a VecEnv: its spec and that of its family differ in "
            f"{', '.join(differ)}"
        )
    return env


def envs_on_gpu(config: RunConfig) -> bool:
    """Return whether the envs are simulated on a GPU if the run has one."""
    sim = config.sim.options
    return getattr(sim, "device", "cpu") != "cpu" or getattr(sim, "sim_backend", "") == "physx_cuda"


def settled(config: RunConfig) -> RunConfig:
    """Replace ``auto`` by what it means on this machine: the device, and the env groups that follow from it.

    So a run reads the same elsewhere, and goes on with the same groups. UserError for a device that is not here.
    """
    runtime = config.runtime
    device = device_of(runtime)
    name = device.type if runtime.separate_processes else str(device)
    groups = runtime.groups_of_worker(device.type == "cuda", envs_on_gpu(config))
    return replace(config, runtime=replace(runtime, device=name, groups_per_worker=groups))


def acting_device(config: RunConfig) -> torch.device:
    """Return the device of a policy that acts outside training, that of the run.

    A run on Ray may have a GPU that this machine lacks; then it is the CPU.
    """
    runtime = config.runtime
    return resolve_device("auto" if runtime.separate_processes and runtime.device == "cuda" else runtime.device)


def make_acting_env(
    config: RunConfig,
    num_envs: int,
    num_threads: int = 0,
    run_dir: Path = Path(),
    delay: int | None = None,
    cut_after_success: int = 0,
) -> VecEnv:
    """Build the environments in which the run's policy acts: those of ``make_env``, with its delays of inference.

    num_threads: 0 is all cores. delay: delay of all decisions but an episode's first, control steps. None draws it for
    a policy with ``max_delay``; for another policy it is 0.
    """
    env = make_env(config, num_envs, num_threads or threads.available_cores(), run_dir)
    env.cut_after_success = cut_after_success
    return with_delays(env, config.policy.options.execute, config.max_delay, delay)


def acting_envs(config: RunConfig, wanted: int) -> int:
    """Return the number of envs for so many episodes: at most that of training, if the family has ``few_copies``."""
    family, _ = split_name(config.task.name)
    few = getattr(FAMILIES[family].build, "few_copies", False)
    return min(wanted, MAX_EVAL_ENVS, *([config.num_envs] if few else []))


def make_eval_env(
    config: RunConfig, episodes: int, num_threads: int = 0, run_dir: Path = Path(), delay: int | None = None
) -> VecEnv:
    """Build the environments of ``make_acting_env`` for an evaluation of so many episodes; see ``acting_envs``."""
    return make_acting_env(config, acting_envs(config, episodes), num_threads, run_dir, delay)


def with_delays(env: VecEnv, execute: int, max_delay: int, delay: int | None) -> VecEnv:
    """Add the delays of inference of a policy with ``execute`` and ``max_delay``. delay: see ``make_acting_env``."""
    longest = max_delay or delay or 0
    if not longest:
        return env
    return DelayedEnv(env, max(execute, longest), longest, delay)  # the next inference begins when this one has ended


def make_sampler(
    config: RunConfig, spec: EnvSpec, num_envs: int, first_seed: int, incarnation: int = 0
) -> EpisodeSampler:
    """Build the sampler of the training episodes of ``num_envs`` envs. first_seed: env seed of the first one.

    For an algorithm with a group_size, that many neighbouring envs have the same episodes and all envs start together.
    Otherwise the ends of the first episodes are staggered.
    """
    setup = SamplerSetup(
        num_envs,
        first_seed,
        splits=(TRAIN,) if spec.instructions else None,
        stagger=config.group_size == 1,
        stages=True,
        group_size=config.group_size,
        incarnation=incarnation,
        repeat_failures=config.repeat_failures,
    )
    return SAMPLERS[config.sampler.name].build(spec, config.sampler.options, setup)


def evaluation_plans(spec: EnvSpec, episodes: int, seed: int, during_training: bool = False) -> EpisodePlans:
    """Return the fixed episodes of an evaluation.

    No two seeds share one. Evaluations during training, the others and training itself have none in common.
    """
    purpose = Purpose.VALIDATION if during_training else Purpose.EVALUATION
    return first_episodes(spec, episodes, first_env_seed(purpose, seed))


def make_policy(config: RunConfig, spec: EnvSpec) -> Policy:
    """Build the run's policy on the CPU, with fresh weights."""
    policy = POLICIES[config.policy.name].build(spec, config.policy.options)
    check_base(policy, Policy, f"policy={config.policy.name}")
    return policy


def make_saved_policy(config: RunConfig, run_dir: Path, spec: EnvSpec) -> Policy:
    """Build a policy on the CPU, with weights that those of a checkpoint in ``run_dir`` must replace."""
    return make_policy(with_architecture(config, run_dir), spec)


def build_policy(spec: EnvSpec, section: Mapping[str, Any]) -> Policy:
    """Build the policy of a section ``policy`` of a file. UserError if a value does not fit."""
    entry = POLICIES[section["name"]]
    return entry.build(spec, read_section(section, entry.config, "policy").options)


def make_algorithm(config: RunConfig, policy: Policy) -> Any:
    """Build the run's algorithm on the policy's device. Its type depends on its trainer."""
    device = next(policy.parameters()).device
    return ALGORITHMS[config.algo.name].build(policy, config.algo.options, seed=config.seed, device=device)


def load_checkpoint(run_dir: Path, name: str) -> checkpoint.Checkpoint:
    """Load the policy's part of a checkpoint: ``last`` or ``step_<env_steps>``. UserError if it is damaged."""
    if name == "last":
        return checkpoint.load_last(run_dir, only="policy")
    folders = {path.name: path for path in newest_first(run_dir / "checkpoints")}
    if name not in folders:
        raise unknown_name("checkpoint", name, ["last", *folders])
    return checkpoint.load(folders[name], only="policy")


def load_policy(config: RunConfig, found: checkpoint.Checkpoint) -> Policy:
    """Build the run's policy with a checkpoint's weights, on the CPU, to act. UserError if the weights do not fit."""
    spec = make_spec(config)
    run_dir = found.path.parents[1]
    check_interface(run_dir, spec)
    policy = make_saved_policy(config, run_dir, spec)
    where = f"{found.path} does not fit the task and policy of this version of the code"
    weights = checkpoint.read_weights(found.state, where)
    checkpoint.check_weights(weights, policy.state_dict(), where)
    policy.load_state_dict(weights)
    return policy.eval()


def evaluate_policy(
    config: RunConfig,
    policy: Policy,
    plans: EpisodePlans,
    seed: int,
    noises: Sequence[EvalNoise],
    num_threads: int = 0,
    delay: int | None = None,
    watch: Callable[[float], None] = lambda share: None,
    keep: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate the policy in the episodes of ``evaluation_plans`` for ``seed``, with each of ``noises``.

    The policy is moved to the run's device, in evaluation mode. num_threads: 0 is all cores. delay: that of
    ``make_acting_env``. watch: gets the share of all that is done. keep: records of the episodes with the first noise.
    See ``evaluate`` for the results.
    """

    def part(i: int) -> Callable[[float], None]:
        return lambda share: watch((i + share) / len(noises))

    policy.to(acting_device(config)).eval()
    threads.use(num_threads or threads.torch_cores())
    with closing(make_eval_env(config, len(plans), num_threads, delay=delay)) as env:
        return [
            evaluate(policy, env, plans, seed, noise, watch=part(i), keep=keep and not i)
            for i, noise in enumerate(noises)
        ]


def delay_steps(spec: EnvSpec, max_delay: int, delay_ms: float | None) -> int | None:
    """Return a latency of inference (ms) in control steps; None for None, which is that of training.

    max_delay: largest delay that the policy knows of, control steps; 0 if it knows none, and then any is allowed.
    UserError if the latency is no whole number of control steps, or longer than ``max_delay``.
    """
    if delay_ms is None:
        return None
    dt_ms = 1000 * spec.control_dt_s
    steps = round(delay_ms / dt_ms)
    if abs(steps * dt_ms - delay_ms) > 1e-3 * dt_ms:  # the numbers below have six digits
        below = floor(delay_ms / dt_ms)
        raise UserError(
            f"delay_ms: got {delay_ms:g}, allowed: whole control steps of {dt_ms:g} ms, the nearest "
            f"{below * dt_ms:g} and {(below + 1) * dt_ms:g}; embodied.deploy robot=sim has latency_ms of any length"
        )
    if max_delay and steps > max_delay:
        raise UserError(
            f"delay_ms: got {delay_ms:g}, which is {steps} control steps, allowed: at most policy.max_delay="
            f"{max_delay}, which is {max_delay * dt_ms:g} ms"
        )
    return steps
