"""Initial policy of a new run: with fresh weights, or with those of the run ``init``.

weights of init ── remove those to reset ──► add fresh ones ── check names, shapes and must_match ──► policy
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from embodied.algos import ALGORITHMS
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.runtime import checkpoint
from embodied.session.config import RunConfig, read_run, with_architecture
from embodied.session.factories import make_policy
from embodied.session.files import CONFIG_FILE


def make_initial_policy(config: RunConfig, spec: EnvSpec) -> Policy:
    """Build the run's policy, with the weights of ``init`` if it is given.

    Exploration and critic stay fresh if the algorithm of ``init`` does not explore, because it has not trained them. A
    policy that wraps another one loads the weights into the wrapped policy. UserError if ``init`` has another task,
    another architecture or no checkpoint, or if a wrapping policy has no ``init``.
    """
    if config.init is not None:
        config = with_architecture(config, Path(config.init))
    policy = make_policy(config, spec)
    if config.init is None:
        if policy.wraps is not None:
            raise UserError(f"policy={config.policy.name} needs a policy to wrap: init=<run directory> is missing")
        return policy
    run_dir = Path(config.init)
    source = read_run(run_dir)
    if source.task.name != config.task.name:
        raise UserError(f"init={run_dir} is a run of task {source.task.name}, this one is of {config.task.name}")
    found = checkpoint.load_latest(run_dir, only="policy")
    if found is None:
        raise UserError(f"init={run_dir} has no checkpoint yet")
    supervised = not ALGORITHMS[source.algo.name].build.explores
    fresh = (policy.not_imitated or ()) if supervised else ()
    weights = checkpoint.read_weights(found.state, f"init={run_dir}")
    if policy.wraps is not None and source.policy.name != config.policy.name:
        wrapped = policy.wraps
        weights = {wrapped + key: value for key, value in weights.items()}
        fresh = tuple(key for key in policy.state_dict() if not key.startswith(wrapped))
    own = policy.state_dict()
    weights = {key: own[key] for key in own if key.endswith(policy.optional_suffixes)} | weights
    weights = merge_weights(weights, own, fresh, f"init={run_dir}")
    for key in policy.must_match:
        theirs, ours = getattr(source.policy.options, key), getattr(config.policy.options, key)
        if theirs != ours:
            raise UserError(f"init={run_dir} was trained with policy.{key}={theirs}, this run has {ours}")
    policy.load_state_dict(weights)
    return policy


def merge_weights(
    found: Mapping[str, Tensor], own: Mapping[str, Tensor], fresh: tuple[str, ...], where: str
) -> dict[str, Tensor]:
    """Return ``found`` with the weights whose names begin with a prefix in ``fresh`` replaced by those of ``own``.

    UserError unless the result has the names and shapes of ``own``. where: start of the message.
    """
    weights = {key: value for key, value in found.items() if not key.startswith(fresh)}
    weights |= {key: value for key, value in own.items() if key.startswith(fresh)}
    cure = f"has a policy of another architecture: give the policy options of its {CONFIG_FILE}"
    checkpoint.check_weights(weights, own, f"{where} {cure}")
    return weights
