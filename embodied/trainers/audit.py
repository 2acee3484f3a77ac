"""Checks of a run: what a training claims of its last checkpoint, shown again on this machine.

Audit: the checkpoint, trained on in ``sync`` and ``local`` for some iterations ──► CHECKS ──► a Result each

A check measures a deviation or counts what differs, and passes if that is at most its tolerance. What a run does not
claim passes with the reason. What there was no time for stays open.
"""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from embodied.algos.batch import evaluate_in_pieces, merge_fragments
from embodied.algos.config import PPOConfig
from embodied.core.algorithm import Metrics
from embodied.core.device import copied_to_cpu
from embodied.core.errors import UserError, describe_error, one_line
from embodied.core.policy import Policy
from embodied.core.types import Fragment
from embodied.deployment.bundle.write import TOLERANCE, check_exportable, chosen_layout
from embodied.envs.checks.conformance import run_checks
from embodied.runtime import checkpoint, threads
from embodied.runtime.checkpoint import Checkpoint
from embodied.runtime.config import RuntimeConfig
from embodied.runtime.evaluator import run_episodes
from embodied.runtime.loop import Runtime
from embodied.runtime.registry import RUNTIMES
from embodied.session import factories
from embodied.session.config import RunConfig, with_architecture
from embodied.session.deployed.exporting import bundle_source, export_bundle, origin_of
from embodied.trainers import trainer_of
from embodied.trainers.reinforcement import ReinforcementTrainer, build

FLOAT32 = 1e-5  # deviation of a mean ratio from 1, and of a KL from 0, that rounding explains
EPISODES = 20  # of the evaluation that is repeated
RESETS, STEPS = 500, 20  # of the checks of the environment: resets, and control steps of an episode
EXPORT_S, EXPORT_VLA_S = 5.0, 120.0  # on a machine without other work; an export that has begun cannot be stopped
State = dict[str, Any]


class NotClaimed(Exception):
    """The run does not claim what a check is about; the message says why."""


class OutOfTime(Exception):
    """There is no time for a check."""


class Result(NamedTuple):
    """Result of a check. passed: None if it is open. reason: why there is no value, or what the value means."""

    passed: bool | None
    value: float | None
    tolerance: float | None
    reason: str


@dataclass
class Audit:
    """A run under examination. folder: an empty one, for what the checks write. seconds: time for all of them."""

    config: RunConfig
    run_dir: Path
    found: Checkpoint
    folder: Path
    seconds: float
    iteration_s: float = 0.0
    """Seconds of the slowest iteration of training until now."""

    def __post_init__(self) -> None:
        self.began_s, self.began_cpu_s = time.monotonic(), time.process_time()
        self.reinforced = issubclass(trainer_of(self.config), ReinforcementTrainer)

    def need(self, seconds: float) -> None:
        """Raise OutOfTime unless so many seconds are left."""
        if time.monotonic() - self.began_s + seconds > self.seconds:
            raise OutOfTime

    def claim_repetition(self) -> None:
        """Raise NotClaimed if the run's kernels or its simulator need not repeat."""
        if self.config.runtime.device.startswith("cuda"):
            raise NotClaimed("kernels of a GPU may round differently")
        if factories.make_spec(self.config).repeats != "all":
            raise NotClaimed("its simulator says that it is not deterministic")

    def policy(self) -> Policy:
        return factories.load_policy(self.config, replace(self.found, state=self.found.state["policy"]))

    @contextmanager
    def training(self, name: str = "sync", state: State | None = None, **algo: Any) -> Iterator[Runtime]:
        """Go on from the checkpoint, or a state, in a runtime of this process, without staleness. algo: new options."""
        if not self.reinforced:
            raise NotClaimed(f"algo={self.config.algo.name} learns from given targets, without a runtime")
        given = {option.name: getattr(self.config.runtime, option.name) for option in fields(RuntimeConfig)}
        given |= {"name": name, "max_staleness": 0, "order": "ticket", "eval_every": 0}
        changed = replace(self.config.algo, options=replace(self.config.algo.options, **algo))
        own = with_architecture(self.config, self.run_dir)
        config = replace(own, runtime=RUNTIMES[name].config(**given), algo=changed)
        with build(config, self.folder, new=False) as runtime:
            runtime.load_state_dict(copy.deepcopy(state or self.found.state))
            yield runtime

    def iterate(self, runtime: Runtime) -> Metrics:
        """Make one iteration; return its metrics."""
        self.need(self.iteration_s)
        began = time.monotonic()
        metrics = next(runtime.iterations()).metrics
        self.iteration_s = max(self.iteration_s, time.monotonic() - began)
        return metrics

    def written(self, state: State) -> State:
        """Write a state as a checkpoint, and read it."""
        return cast("State", checkpoint.load(checkpoint.save(self.folder, self.found.env_steps, state)).state)

    @cached_property
    def fresh(self) -> tuple[Tensor, float, int]:
        """Draw decisions with the final weights, and update on them with learning rate 0.

        Return the ratios of learner to actor, the KL that the update found, and how many parameters it changed.
        """
        options, ratios = self.config.algo.options, list[Tensor]()
        if not isinstance(options, PPOConfig):
            raise NotClaimed(f"algo={self.config.algo.name} learns without a ratio of probabilities")
        if self.config.runtime.device.startswith("cuda"):
            raise NotClaimed("kernels of a GPU may round differently")
        critic_rate = options.critic_learning_rate and 0.0  # None stays None
        with self.training(schedule="fixed", learning_rate=0.0, critic_learning_rate=critic_rate) as runtime:
            algorithm = cast("Any", runtime.learner).algorithm
            policy, update = algorithm.policy, algorithm.update

            def compare(batch: Sequence[Fragment], version: int) -> Metrics:
                one = merge_fragments(batch)
                obs, chain = {key: value.flatten(0, 1) for key, value in one.obs.items()}, one.chain.flatten(0, 1)
                again = evaluate_in_pieces(policy, obs, chain, -(-len(chain) // options.num_minibatches)).log_prob_B
                log_ratio_TN = again.view_as(one.log_prob_TN) - one.log_prob_TN
                ratios.append(log_ratio_TN[one.num_steps_TN > 0].double().exp())
                return cast("Metrics", update(batch, version))

            algorithm.update = compare
            rescaled = "critic." if getattr(self.config.policy.options, "scale_values", False) else "\0"
            before = copied_to_cpu(dict(policy.named_parameters()))
            metrics = self.iterate(runtime)
            changed = differing(before, dict(policy.named_parameters()))
            return torch.cat(ratios), metrics["train/approx_kl"], sum(not name.startswith(rescaled) for name in changed)

    @cached_property
    def straight(self) -> tuple[State, State]:
        """Train two iterations with ``sync``; return the checkpoint after the first one and the state at the end."""
        self.claim_repetition()
        with self.training() as runtime:
            if not runtime.resumes_exactly:
                raise NotClaimed("its environments cannot restore a state")
            self.iterate(runtime)
            middle = self.written(runtime.state_dict())
            self.iterate(runtime)
            return middle, runtime.state_dict()


# -- checks ------------------------------------------------------------------------------------------------------------
def check_round_trip(audit: Audit) -> Result:
    """The state of the run, loaded from the checkpoint and written again, is the same bit for bit."""
    state = {key: value for key, value in audit.found.state.items() if key != "train"}
    if audit.reinforced:
        with audit.training() as runtime:
            again = runtime.state_dict()
            again["runtime"] = {key: again["runtime"][key] for key in state["runtime"]}  # an earlier version kept less
            if not runtime.resumes_exactly:
                state["runtime"] = state["runtime"] | {"groups": again["runtime"]["groups"]}
    else:
        again = state | {"policy": audit.policy().state_dict()}
    return count("values differ", differing(state, audit.written(again)))


def check_ratio(audit: Audit) -> Result:
    """The learner gives decisions, freshly drawn with the final weights, the probability that the actor recorded."""
    return at_most(FLOAT32, float((audit.fresh[0] - 1).abs().mean()), "is the mean |ratio - 1|")


def check_kl(audit: Audit) -> Result:
    """Actor and learner have the same distribution, and so have the policies before and after an update of rate 0."""
    ratio, of_update, _ = audit.fresh
    return at_most(FLOAT32, max(float((ratio - 1 - ratio.log()).mean()), abs(of_update)), "nats of divergence")


def check_learning_rate_0(audit: Audit) -> Result:
    """An update with learning rate 0 changes no parameter."""
    return at_most(0, audit.fresh[2], "parameters changed")


def check_evaluation(audit: Audit) -> Result:
    """Every episode of an evaluation has the same length, return and outcomes the second time."""
    audit.claim_repetition()
    config, columns = audit.config, list[Tensor]()
    for _ in range(2):
        with closing(factories.make_eval_env(config, EPISODES)) as env:
            plans = factories.evaluation_plans(env.spec, EPISODES, config.seed)
            noise = config.runtime.eval_noise
            ended = run_episodes(audit.policy(), env, plans, noise, watch=lambda _: audit.need(0))
            assert ended is not None
            columns.append(torch.stack([ended.return_M, ended.length_M, *ended.once.values(), *ended.at_end.values()]))
    return at_most(0, int((columns[0] != columns[1]).any(0).sum()), f"of {EPISODES} episodes differ")


def check_resume(audit: Audit) -> Result:
    """Two iterations from the checkpoint, with a checkpoint between them, end as two without."""
    middle, end = audit.straight
    with audit.training(state=middle) as runtime:
        audit.iterate(runtime)
        return count("values differ", differing(end, runtime.state_dict()))


def check_sync_equals_local(audit: Audit) -> Result:
    """Two iterations from the checkpoint end alike in one thread and in several, without staleness."""
    _, end = audit.straight
    with audit.training("local") as runtime:
        audit.iterate(runtime)
        audit.iterate(runtime)
        return count("values differ", differing(end, runtime.state_dict()))


def check_environment(audit: Audit) -> Result:
    """The environment keeps the contract of a VecEnv (envs/checks)."""
    make = partial(factories.make_env, audit.config, num_threads=threads.available_cores(), run_dir=audit.folder)
    results = run_checks(make, 4, 0, RESETS, STEPS, audit.began_s + audit.seconds - time.monotonic())
    broken = [f"{result.name} ({result.why})" for result in results if result.passed is False]
    if broken:
        audit.need(0)  # otherwise they have failed for lack of time
    return count("rules are broken", broken)


def check_bundle(audit: Audit) -> Result:
    """The exported policy and its runner give the chunks of torch."""
    config, spec = audit.config, factories.make_spec(audit.config)
    try:
        check_exportable(spec, config.robot)
    except UserError as error:
        raise NotClaimed(one_line(error)) from None
    slower = (time.monotonic() - audit.began_s) / (time.process_time() - audit.began_cpu_s)  # by other programs
    audit.need((EXPORT_VLA_S if spec.cameras else EXPORT_S) * max(1.0, slower))
    policy, path = audit.policy(), Path(mkdtemp(dir=audit.folder))
    source = bundle_source(config, policy, origin_of(config, audit.run_dir, audit.found), episodes=4)
    bundle = export_bundle(path, source, chosen_layout(policy))
    return at_most(TOLERANCE, bundle.parity_max, "of the action's scale")


CHECKS = (
    check_round_trip, check_ratio, check_kl, check_learning_rate_0, check_evaluation, check_resume,
    check_sync_equals_local, check_environment, check_bundle,
)  # fmt: skip


def at_most(tolerance: float, value: float, reason: str) -> Result:
    return Result(value <= tolerance, value, tolerance, reason)


def differing(one: object, other: object, name: str = "") -> Iterator[str]:
    """Yield the names of what differs, bit by bit, in nested dicts and lists of tensors and plain values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key in one:
            yield from differing(one[key], other[key], f"{name}/{key}".removeprefix("/"))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(*pair, f"{name}/{i}")
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        bits = [tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        if one.dtype != other.dtype or one.shape != other.shape or not torch.equal(*bits):
            yield name
    elif one != other:
        yield name


def count(what: str, found: Iterable[str]) -> Result:
    names = list(found)
    return at_most(0, len(names), ", such as ".join([what, *names[:1]]))


def examine(audit: Audit, check: Callable[[Audit], Result]) -> Result:
    try:
        audit.need(0)
        return check(audit)
    except NotClaimed as error:
        return Result(True, None, None, f"not claimed: {error}")
    except OutOfTime:
        return Result(None, None, None, "no time was left")
    except Exception as error:  # a check that cannot be made does not hold
        return Result(False, None, None, describe_error(error))


def on_this_machine(config: RunConfig) -> RunConfig:
    """Return the configuration with the CPU if the run had a GPU and this machine has none."""
    gone = config.runtime.device.startswith("cuda") and not torch.cuda.is_available()
    return factories.settled(replace(config, runtime=replace(config.runtime, device="cpu")) if gone else config)
