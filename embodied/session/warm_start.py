"""The policy of a new run: fresh, or with the weights of another run (``init=``)."""

from pathlib import Path

from embodied.algos import ALGORITHMS
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.policies import POLICIES
from embodied.runtime import checkpoint
from embodied.session.config import RunConfig, Section, read_run
from embodied.session.factories import make_policy, make_saved_policy
from embodied.session.files import CONFIG_FILE
from embodied.session.interface import changed, check_interface


def make_initial_policy(config: RunConfig, spec: EnvSpec) -> Policy:
    """Build the policy of a new run, with the weights of the run ``init`` if it is given.

    Exploration and critic stay fresh if the algorithm of ``init`` does not explore. A policy that wraps another one
    loads the weights into the wrapped policy. UserError if ``init`` does not fit, a wrapping policy has none, or
    ``policy.pretrained`` is given too.
    """
    if config.init is None:
        policy = make_policy(config, spec)
        if policy.wraps is not None:
            raise UserError(f"policy={config.policy.name} needs a policy to wrap: init=<run directory> is missing")
        return policy
    run_dir, where = Path(config.init), f"init={config.init}"
    pretrained = getattr(config.policy.options, "pretrained", None)
    if pretrained is not None:
        raise UserError(f"{where} and policy.pretrained={pretrained} both name the weights to start from: give one")
    source = read_run(run_dir)
    _check_kinds(config.policy, source.policy, where)
    if source.task.title != config.task.title:
        raise UserError(f"{where} is a run of task {source.task.title}, this one is of {config.task.title}")
    if source.robot != config.robot and (change := changed(run_dir, spec)):
        raise UserError(f"{where} is a run of robot {source.robot}, this one is of {config.robot}: {change}")
    check_interface(run_dir, spec)
    found = checkpoint.load_last(run_dir, only="policy")
    policy = make_saved_policy(config, run_dir, spec)
    fresh = () if ALGORITHMS[source.algo.name].build.explores else tuple(policy.not_imitated or ())
    weights, own = checkpoint.read_weights(found.state, where), policy.state_dict()
    if policy.wraps is not None and source.policy.name != config.policy.name:
        wrapped = policy.wraps
        weights = {wrapped + key: value for key, value in weights.items()}
        fresh = tuple(key for key in own if not key.startswith(wrapped))
    weights = {key: value for key, value in weights.items() if not key.startswith(fresh)}
    weights |= {key: value for key, value in own.items() if key.startswith(fresh)}
    weights = {key: own[key] for key in own if key.endswith(policy.optional_suffixes)} | weights
    cure = f"has a policy of another architecture: give the policy options of its {CONFIG_FILE}"
    checkpoint.check_weights(weights, own, f"{where} {cure}")
    explores = not fresh and ALGORITHMS[config.algo.name].build.explores
    for key in policy.must_match + (policy.must_match_exploring if explores else ()):
        theirs, ours = getattr(source.policy.options, key), getattr(config.policy.options, key)
        if theirs != ours:
            raise UserError(f"{where} was trained with policy.{key}={theirs}, this run has {ours}")
    policy.load_state_dict(weights)
    return policy


def _check_kinds(own: Section, source: Section, where: str) -> None:
    """Raise UserError unless a policy, or the one that it wraps, has the class of ``source``, or a related one."""
    build, theirs = POLICIES[own.name].build, POLICIES[source.name].build
    takes = build if own.name == source.name else getattr(build, "wrapped", None) or build
    if not (isinstance(takes, type) and isinstance(theirs, type)):
        return
    if not (issubclass(takes, theirs) or issubclass(theirs, takes)):
        kinds = ((theirs, source.options), (takes, own.options))
        has, needs = (f"{k.__name__} on {'cameras' if x.observed_cameras else 'a state vector'}" for k, x in kinds)
        raise UserError(f"{where} has policy={source.name}, a {has}; policy={own.name} takes a {needs}")
