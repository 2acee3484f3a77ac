"""Check that a ``VecEnv`` keeps its contract, whatever its simulator.

make(N) ──► Trial: records one rollout ──► CHECKS: each examines it, or runs envs of its own ──► Check results

check_env(make)             raises UserError with the first rule that is broken: for tests
run_checks(make, ...)       yields the result of every check: for ``python -m embodied.tasks check=<task>``
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from math import inf, isfinite

import numpy as np
import torch

from embodied.core import contract
from embodied.core.errors import UserError, describe_error, one_line
from embodied.core.spec import Box
from embodied.envs.base.actions import random_actions
from embodied.envs.checks import trial as trials
from embodied.envs.checks.trial import Excused, Make, Recording, Trial, alike, difference, memory_bytes, usage

FUNCTION_OF_ITS_PLAN = (
    "an episode must be a function of its plan and actions, whatever the other envs do: what is random comes from its "
    "seed (in a task of ours, from the rng of reset)"
)
GOES_ON = (
    "an env that has loaded a state must go on exactly (in a task of ours, state_dict and load_state_dict keep what "
    "reset writes outside of the simulation)"
)
FILM_SIZE = (64, 48)  # width and height, pixels
LEAK_BYTES = 32e6  # growth over all resets that no allocator causes
MAX_LEFT_OVER = 2  # threads and files that libraries may keep after their first use


def check_spaces(trial: Trial) -> None:
    """The spec is sound, and observations are as it describes them, at resets, after steps and at ends."""
    env, spec = trial.env, trial.spec
    all_names = {
        "terms of the state": [term.name for term in spec.state],
        "privileged terms": [term.name for term in spec.privileged],
        "cameras": [camera.name for camera in spec.cameras],
        "dimensions of the action": spec.action_names,
        "outcomes": spec.outcomes,
    }
    for kind, names in all_names.items():
        trial.require(len(set(names)) == len(names), f"spec: two {kind} have the same name: {', '.join(names)}")
    trial.require(bool(spec.state) and min(term.size for term in spec.state) > 0, "spec: a term of the state is empty")
    trial.require(spec.control_dt_s > 0 and isfinite(spec.control_dt_s), "spec: control_dt_s must be above 0")
    trial.require(spec.max_episode_steps > 0, "spec: max_episode_steps must be at least 1")
    if isinstance(spec.action, Box):
        trial.require(not spec.action_mask, "spec: a Box of actions has no action_mask")
    else:
        trial.require(min(spec.action.counts) > 0, "spec: a dimension of the action has no choices")
    contract.check_obs(env, trial.rollout[0].obs, env.num_envs, "reset()")
    for moment in trial.rollout:
        contract.check_obs(env, moment.step.obs, env.num_envs, "step().obs")


def check_dtypes(trial: Trial) -> None:
    """Results have their shapes and types and finite values, and a later step does not overwrite them."""
    rule = "observations must be new tensors: a later step has overwritten those of an earlier one"
    for moment in trial.rollout:
        contract.check_types(trial.env, moment.step, trial.executed)
    for before, after in zip(trial.rollout, trial.rollout[1:], strict=False):
        trial.require(alike(before.step.obs, after.obs, tolerance=0.0), rule)


def check_bad_actions(trial: Trial) -> None:
    """``step`` raises ValueError for chunks of a wrong shape, for NaN, and for invalid choices."""
    env, space = trial.env, trial.spec.action
    good = random_actions(space, env.num_envs, trial.chunk, 0)
    bad = {"one row too few": good[1:], "one entry too many": torch.cat([good, good[..., :1]], -1)}
    bad |= {"a NaN": good * torch.nan} if isinstance(space, Box) else {"a choice too high": good + max(space.counts)}
    assert trial.rollout
    for fault, action in bad.items():
        try:
            trial.step(env, action)
        except ValueError:
            continue
        trial.require(False, f"step must raise a ValueError for an action with {fault}")


def check_autoreset(trial: Trial) -> None:
    """SAME_STEP: the env requests one plan per end, and the last observation of an episode is in final_obs."""
    ended, all_first = False, True
    for moment in trial.rollout:
        step = moment.step
        contract.check_ends(trial.env, step)
        ids = step.final_ids.numpy()
        planned = moment.given.rows(ids)
        same = all((getattr(step.episodes.plans, f.name) == getattr(planned, f.name)).all() for f in fields(planned))
        trial.require(same, "an episode that ended must have the plan that the sampler drew for it")
        trial.require(moment.heard == ([ids.tolist()] if len(ids) else []), "sampler.next must be called once per end")
        ended |= len(ids) > 0
        all_first &= alike(step.final_obs, {key: value[ids] for key, value in step.obs.items()}, tolerance=0.0)
    rule = "final_obs must be the last observation of an episode and obs the first one of the next, but they are equal"
    trial.require(not (ended and all_first), rule)


def check_truncation(trial: Trial) -> None:
    """Episodes end at their time limits at the latest."""
    lasted = np.zeros(trial.num_envs, np.int64)
    for moment in trial.rollout:
        step, limit_N = moment.step, moment.given.time_limit_n
        lasted += step.num_steps_N.numpy()
        ended = (step.terminated_N | step.truncated_N).numpy()
        late = (step.episodes.length_M.numpy() > limit_N[step.final_ids.numpy()]).any()
        late |= (~ended & (lasted >= limit_N)).any()
        trial.require(not late, "an episode lasted longer than its plan's time limit")
        lasted[ended] = 0


def check_success(trial: Trial) -> None:
    """Outcomes of episodes are those that their steps reported. Not claimed by an env that reports none."""
    outcomes = trial.spec.outcomes
    reported = {name: torch.zeros(trial.num_envs, dtype=torch.bool) for name in outcomes}
    for step in (moment.step for moment in trial.rollout):
        contract.check_outcomes(trial.env, step)
        for name in outcomes:
            reported[name] |= step.info[name]
            at_end, once = step.episodes.at_end[name], step.episodes.once[name]
            trial.require(step.info[name].dtype == torch.bool, f"outcome {name}: info must be bool")
            same = torch.equal(at_end, step.info[name][step.final_ids])
            trial.require(same, f"outcome {name}: episodes.at_end must be what held after the last step")
            held = bool((once | ~(reported[name][step.final_ids] | at_end)).all())
            trial.require(held, f"outcome {name}: episodes.once must be true of an episode in which it held")
            reported[name][step.final_ids] = False
    if not outcomes:
        raise Excused("not claimed: it reports no outcomes, so evaluations show returns")


def check_partial_reset(trial: Trial) -> None:
    """An env that ends inside a chunk stops there and the other envs go on, as if stepped action by action."""
    for moment in trial.rollout:
        contract.check_executed(trial.env, moment.step, trial.executed)
    if trial.env.max_delay or trial.spec.repeats == "none":
        return
    for k, moments, _ in trial.repeats():
        for moment in moments:
            action, theirs = moment.action[k : k + 1], moment.step
            for e in range(int(theirs.num_steps_N[k])):
                mine = trial.step(trial.alone, action[:, e : e + 1])
                same = bool((mine.reward_NE[0, 0] - theirs.reward_NE[k, e]).abs() <= 1e-3)
                last = moment is moments[-1] and e == int(theirs.num_steps_N[k]) - 1
                same &= bool(mine.terminated_N[0] | mine.truncated_N[0]) == last
                trial.require(same, "a chunk must give the rewards and ends that its actions give one by one")


def check_seeding(trial: Trial) -> None:
    """An episode of each env repeats when it runs alone: the second episode, if later episodes repeat at all."""
    if trial.spec.repeats == "none":
        raise Excused("not claimed: its simulator says that it is not deterministic")
    for k, moments, obs in trial.repeats():
        for t, moment in enumerate(moments):
            there, first = {key: value[k : k + 1] for key, value in moment.obs.items()}, t * trial.executed
            if not alike(obs, there):
                when = f"after {first} control steps" if first else "after the reset"
                trial.require(False, f"{FUNCTION_OF_ITS_PLAN}; {when} {difference(obs, there)}")
            mine, theirs = trial.step(trial.alone, moment.action[k : k + 1]), moment.step
            same = torch.allclose(mine.reward_NE[0], theirs.reward_NE[k], atol=1e-4)
            for name in ("terminated_N", "truncated_N", "num_steps_N"):
                same &= bool(getattr(mine, name)[0] == getattr(theirs, name)[k])
            between = f"between control steps {first} and {first + trial.executed}"
            trial.require(same, f"{FUNCTION_OF_ITS_PLAN}; rewards or ends differ {between}")
            obs = mine.obs
        row = theirs.final_ids.tolist().index(k)
        last = {key: value[row : row + 1] for key, value in theirs.final_obs.items()}
        trial.require(alike(mine.final_obs, last), FUNCTION_OF_ITS_PLAN + " (see its final_obs)")


def check_exact_resume(trial: Trial) -> None:
    """A state that was saved in the middle of a run continues exactly in another env."""
    if not trial.env.resumes_exactly:
        raise Excused("not claimed: a resumed run starts new episodes")
    env, other = trial.build(trial.num_envs), trial.build(trial.num_envs)
    half = trial.num_chunks // 2
    drawing, resumed = trial.recording(), trial.recording()
    obs = trial.reset(env, drawing)
    for t in range(half):
        obs = trial.step(env, trial.actions(obs, t)).obs
    resumed.load_state_dict(drawing.state_dict())
    other.load_state_dict(env.state_dict(), resumed)
    for t in range(half, 2 * half):
        action = trial.actions(obs, t)
        mine, theirs = trial.step(env, action), trial.step(other, action)
        same = torch.equal(mine.reward_NE, theirs.reward_NE) and alike(mine.obs, theirs.obs, tolerance=0.0)
        trial.require(same, GOES_ON)
        obs = mine.obs


def check_rendering(trial: Trial) -> None:
    """Images for people have the requested size and are not blank, after resets and after every control step."""
    env = trial.build(trial.num_envs)
    if env.film is None:
        raise Excused("not claimed: it cannot be rendered")
    width, height = FILM_SIZE
    render = env.film(width, height)
    obs = trial.reset(env, trial.recording())
    frames = [trial.apart(render)]
    env.on_control_step = lambda stepped: frames.append(render())
    step = trial.step(env, trial.actions(obs, 0))
    env.on_control_step = None
    steps = int(step.num_steps_N.max())
    trial.require(len(frames) - 1 == steps, "on_control_step must be called once after every control step")
    expected = (env.num_envs, height, width, 3)
    for frame in frames:
        right = frame.shape == expected and frame.dtype == np.uint8
        trial.require(right, f"a picture is {frame.dtype} {list(frame.shape)}, must be uint8 {list(expected)}")
    trial.require(any(frame.min() < frame.max() for frame in frames), "every picture is of one colour")
    trial.require(len(env.instruction_texts) == env.num_envs, "instruction_texts must have one text per env")


def check_closing(trial: Trial) -> None:
    """``close`` ends all threads and processes and closes all files; a second call does nothing."""
    assert trial.rollout  # libraries have started their threads
    before = usage()
    env = trial.make(trial.num_envs)
    with closing(env):
        trial.step(env, trial.actions(trial.reset(env, trial.recording()), 0))
    env.close()
    name = env.spec.task
    del env
    gc.collect()
    for what, count in usage().items():
        kept = count <= before[what] + (0 if what == "processes" else MAX_LEFT_OVER)
        trial.require(kept, f"{name} had {before[what]} {what} before it was built and {count} after close")


def check_leaks(trial: Trial) -> None:
    """Memory, processes, threads and files do not grow with the number of episodes."""
    env = trial.build(trial.num_envs)
    obs = trial.reset(env, Recording(env.spec, env.num_envs, trial.seed, limit=1))
    before, memory = usage(), memory_bytes()
    resets, warm, t = 0, 0, 0
    while resets < trial.resets and trial.left_s(trials.LEAKS_SHARE) > 0:
        actions = trial.actions(obs, t)
        step = trial.step(env, actions if env.max_delay else actions[:, :1])
        obs, resets, t = step.obs, resets + len(step.final_ids), t + 1
        trial.require(len(step.final_ids) > 0, "episodes of one control step did not end")
        if not warm and resets >= trial.resets // 5:  # caches are full
            warm, before, memory = resets, usage(), memory_bytes()
    over, grown = f"over {resets - warm} episodes", memory_bytes() - memory
    each = f"{grown / max(1, resets - warm) / 1e3:.0f} kB each"
    trial.require(grown <= LEAK_BYTES, f"memory has grown by {grown / 1e6:.0f} MB {over}, {each}")
    for what, count in usage().items():
        kept = count <= before[what] + MAX_LEFT_OVER
        trial.require(kept, f"{what} have grown from {before[what]} to {count} {over}")
    if resets < trial.resets:
        raise Excused(f"{resets} resets instead of {trial.resets}, for lack of time (max_minutes=)")


_ALL: tuple[Callable[[Trial], None], ...] = (
    check_spaces, check_dtypes, check_bad_actions, check_autoreset, check_truncation, check_success, check_seeding,
    check_partial_reset, check_exact_resume, check_rendering, check_closing, check_leaks,
)  # fmt: skip
CHECKS = {check.__name__.removeprefix("check_"): check for check in _ALL}
"""The checks by name, in the order in which they run."""
NOT_CONTRACT = ("rendering", "closing", "leaks")
"""Checks that take too long for every test of a simulator."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the check ``name``."""

    name: str
    passed: bool | None
    """None: not reached."""
    why: str = ""
    """The rule that is broken, or why there was nothing to check."""


def check_env(make: Make, num_envs: int = 4, seed: int = 0) -> None:
    """Raise UserError with the first rule that an environment breaks, by all checks but those of ``NOT_CONTRACT``."""
    with ExitStack() as opened:
        trial = Trial(make, opened, num_envs, seed)
        for name, check in CHECKS.items():
            if name not in NOT_CONTRACT:
                try:
                    check(trial)
                except Excused:
                    continue


def run_checks(
    make: Make,
    num_envs: int = 4,
    seed: int = 0,
    resets: int = 10_000,
    steps: int = 50,
    seconds: float = inf,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Yield the result of every check, also after failures. If the env cannot be run at all, no check is reached.

    resets: of the check of leaks. steps: largest time limit of an episode, so that slow simulators reach the ends of
    episodes. seconds: time limit of all checks. note: receives a sentence for the user. An exception of the environment
    fails the check.
    """
    with ExitStack() as opened:
        trial = Trial(make, opened, num_envs, seed, steps, resets, seconds, note)
        last = ""
        for name, check in CHECKS.items():
            if trial.broken:
                yield Result(name, None, f"not reached: see {last}")
                continue
            last = name
            try:
                check(trial)
            except Excused as reason:
                yield Result(name, True, str(reason))
            except (UserError, trials.OutOfTime) as error:
                yield Result(name, False, one_line(error))
            except (Exception, SystemExit) as error:  # third-party code may raise anything
                yield Result(name, False, f"raised {describe_error(error)}")
            else:
                yield Result(name, True)
