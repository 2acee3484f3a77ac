"""Load the policy of a run's checkpoint, and evaluate it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from math import floor
from pathlib import Path
from typing import Any

from embodied.core.errors import UserError, unknown_name
from embodied.core.policy import Policy
from embodied.runtime import checkpoint, evaluate, threads
from embodied.runtime.config import EvalNoise
from embodied.runtime.evaluator import MAX_EVAL_ENVS
from embodied.session.config import RunConfig
from embodied.session.factories import evaluation_plans, make_acting_env, make_policy, make_spec


def load_checkpoint(run_dir: Path, name: str) -> checkpoint.Checkpoint:
    """Load the policy's part of a checkpoint: ``last`` (the newest that is whole) or ``step_<env_steps>``."""
    if name == "last":
        newest = checkpoint.load_latest(run_dir, only="policy")
        if newest is None:
            raise UserError(f"{run_dir} has no checkpoint yet")
        return newest
    folders = {path.name: path for path in checkpoint.newest_first(run_dir / "checkpoints")}
    if name not in folders:
        raise unknown_name("checkpoint", name, ["last", *folders])
    try:
        return checkpoint.load(folders[name], only="policy")
    except checkpoint.CorruptCheckpoint as error:
        raise UserError(f"{error}; checkpoint=last takes the newest that is whole") from error


def load_policy(config: RunConfig, found: checkpoint.Checkpoint) -> Policy:
    """Build the run's policy with a checkpoint's weights, on the CPU. UserError if the weights do not fit."""
    policy = make_policy(config, make_spec(config))
    where = f"{found.path} does not fit the task and policy of this version of the code"
    weights = checkpoint.read_weights(found.state, where)
    checkpoint.check_weights(weights, policy.state_dict(), where)
    policy.load_state_dict(weights)
    return policy


def evaluate_policy(
    config: RunConfig,
    policy: Policy,
    episodes: int,
    seed: int,
    noises: Sequence[EvalNoise],
    num_threads: int = 0,
    delay: int | None = None,
    watch: Callable[[float], None] = lambda share: None,
) -> list[dict[str, Any]]:
    """Evaluate the policy on ``episodes`` fixed initial states, with each of ``noises``; see embodied.runtime.evaluate.

    num_threads: 0 is all cores. delay: that of ``make_acting_env``. watch: gets the share of all that is done.
    """

    def part(i: int) -> Callable[[float], None]:
        return lambda share: watch((i + share) / len(noises))

    threads.use(num_threads or threads.torch_cores())
    num_threads = num_threads or threads.available_cores()
    with closing(make_acting_env(config, min(episodes, MAX_EVAL_ENVS), num_threads, delay=delay)) as env:
        plans = evaluation_plans(env.spec, episodes, seed)
        return [evaluate(policy, env, plans, seed, noise, watch=part(i)) for i, noise in enumerate(noises)]


def delay_steps(config: RunConfig, delay_ms: float | None) -> int | None:
    """Return a latency of inference (ms) in control steps; None for None, which is that of training.

    UserError if it is no whole number of control steps, or longer than a policy with ``max_delay`` was trained for.
    """
    if delay_ms is None:
        return None
    dt_ms = 1000 * make_spec(config).control_dt_s
    steps = round(delay_ms / dt_ms)
    if abs(steps * dt_ms - delay_ms) > 1e-3 * dt_ms:  # the numbers below have six digits
        below = floor(delay_ms / dt_ms)
        raise UserError(
            f"delay_ms: got {delay_ms:g}, allowed: whole control steps of {dt_ms:g} ms, the nearest "
            f"{below * dt_ms:g} and {(below + 1) * dt_ms:g}; embodied.deploy robot=sim has latency_ms of any length"
        )
    if config.max_delay and steps > config.max_delay:
        raise UserError(
            f"delay_ms: got {delay_ms:g}, which is {steps} control steps, allowed: at most policy.max_delay="
            f"{config.max_delay}, which is {config.max_delay * dt_ms:g} ms"
        )
    return steps
