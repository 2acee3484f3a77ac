"""The checks of ``conformance``. Each raises UserError with the rule that the environment breaks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from math import isfinite

import numpy as np
import torch

from embodied.core import contract
from embodied.core.episodes import PlanList
from embodied.core.spec import Box, EnvSpec
from embodied.envs.base.actions import random_actions
from embodied.envs.checks import process_usage as held
from embodied.envs.checks.trial import (
    NotApplicable,
    Recording,
    Shortened,
    Trial,
    alike,
    difference,
    require,
    row_of,
)

FUNCTION_OF_ITS_PLAN = "an episode must be a function of its plan and actions, whatever the other envs do"
FILM_SIZE = (64, 48)  # width and height, pixels
LEAK_BYTES = 32e6  # growth over all resets that no allocator causes
MAX_LEFT_OVER = 2  # threads and files that libraries may keep after their first use


def check_spaces(trial: Trial) -> None:
    """The spec is sound, and observations are as it describes them, at resets, after steps and at ends."""
    env, spec = trial.env, trial.env.spec
    for kind, names in _names(spec).items():
        require(env, len(set(names)) == len(names), f"spec: two {kind} have the same name: {', '.join(names)}")
    require(env, bool(spec.state) and min(term.size for term in spec.state) > 0, "spec: a term of the state is empty")
    require(env, spec.control_dt_s > 0 and isfinite(spec.control_dt_s), "spec: control_dt_s must be above 0")
    require(env, spec.max_episode_steps > 0, "spec: max_episode_steps must be at least 1")
    require(env, not (spec.action_mask and isinstance(spec.action, Box)), "spec: a Box of actions has no action_mask")
    if not isinstance(spec.action, Box):
        require(env, min(spec.action.counts) > 0, "spec: a dimension of the action has no choices")
    contract.check_obs(env, trial.rollout[0].obs, env.num_envs, "reset()")
    for moment in trial.rollout:
        contract.check_obs(env, moment.step.obs, env.num_envs, "step().obs")


def _names(spec: EnvSpec) -> dict[str, Sequence[str]]:
    """Return the names in a spec, by the kind of the named thing."""
    return {
        "terms of the state": [term.name for term in spec.state],
        "privileged terms": [term.name for term in spec.privileged],
        "cameras": [camera.name for camera in spec.cameras],
        "dimensions of the action": spec.action_names,
        "outcomes": spec.outcomes,
    }


def check_dtypes(trial: Trial) -> None:
    """Results have their shapes and types and finite values, and a later step does not overwrite them."""
    for moment in trial.rollout:
        contract.check_types(trial.env, moment.step, trial.executed)
    kept = all(
        alike(before.step.obs, after.obs, tolerance=0.0)
        for before, after in zip(trial.rollout, trial.rollout[1:], strict=False)
    )
    require(trial.env, kept, "observations must be new tensors: a later step has overwritten those of an earlier one")


def check_bad_actions(trial: Trial) -> None:
    """``step`` raises ValueError for chunks of a wrong shape, for NaN, and for invalid choices."""
    env, space = trial.env, trial.spec.action
    good = random_actions(space, env.num_envs, trial.chunk, 0)
    bad = {"one row too few": good[1:], "one entry too many": torch.cat([good, good[..., :1]], -1)}
    if isinstance(space, Box):
        bad["a NaN"] = torch.full_like(good, torch.nan)
    elif not env.max_delay:
        bad["a choice too high"] = good + max(space.counts)
    assert trial.rollout
    for fault, action in bad.items():
        try:
            trial.step(env, action)
        except ValueError:
            continue
        require(env, False, f"step must raise a ValueError for an action with {fault}")


def check_autoreset(trial: Trial) -> None:
    """SAME_STEP: the env requests one plan per end, and the last observation of an episode is in final_obs."""
    env, all_first = trial.env, True
    ended = False
    for moment in trial.rollout:
        step = moment.step
        contract.check_ends(env, step)
        ids = step.final_ids.numpy()
        planned = moment.given.rows(ids)
        same = all((getattr(step.episodes.plans, f.name) == getattr(planned, f.name)).all() for f in fields(planned))
        require(env, same, "an episode that ended must have the plan that the sampler drew for it")
        require(env, moment.heard == ([ids.tolist()] if len(ids) else []), "sampler.next must be called once per end")
        first = {key: value[step.final_ids] for key, value in step.obs.items()}
        ended |= len(ids) > 0
        all_first &= alike(step.final_obs, first, tolerance=0.0)
    rule = "final_obs must be the last observation of an episode and obs the first one of the next, but they are equal"
    require(env, not (ended and all_first), rule)


def check_truncation(trial: Trial) -> None:
    """Episodes end at their time limits at the latest; no end is termination and truncation at once."""
    env = trial.env
    for moment in trial.rollout:
        step = moment.step
        require(
            env,
            not bool((step.terminated_N & step.truncated_N).any()),
            "an episode cannot be terminated and truncated at once",
        )
        limit_M = torch.from_numpy(moment.given.rows(step.final_ids.numpy()).time_limit_n)
        require(
            env, bool((step.episodes.length_M <= limit_M).all()), "an episode lasted longer than its plan's time limit"
        )
    lasted = np.zeros(env.num_envs, np.int64)
    for moment in trial.rollout:
        lasted += moment.step.num_steps_N.numpy()
        ended = (moment.step.terminated_N | moment.step.truncated_N).numpy()
        over = ~ended & (lasted >= moment.given.time_limit_n)
        require(env, not over.any(), "an episode lasted longer than its plan's time limit")
        lasted[ended] = 0


def check_success(trial: Trial) -> None:
    """Outcomes of episodes are those that their steps reported. Not claimed by an env that reports none."""
    env = trial.env
    if not env.spec.outcomes:
        for moment in trial.rollout:
            contract.check_outcomes(env, moment.step)
        raise NotApplicable("it reports no outcomes, so evaluations show returns")
    reported = {name: torch.zeros(env.num_envs, dtype=torch.bool) for name in env.spec.outcomes}
    for moment in trial.rollout:
        step = moment.step
        contract.check_outcomes(env, step)
        for name in env.spec.outcomes:
            reported[name] |= step.info[name]
            at_end, once = step.episodes.at_end[name], step.episodes.once[name]
            rule = f"outcome {name}: "
            require(env, step.info[name].dtype == torch.bool, f"{rule}info must be bool")
            require(
                env,
                torch.equal(at_end, step.info[name][step.final_ids]),
                f"{rule}episodes.at_end must be what held after the last step",
            )
            require(
                env,
                bool((once | ~reported[name][step.final_ids]).all()) and bool((once | ~at_end).all()),
                f"{rule}episodes.once must be true of an episode in which it held",
            )
            reported[name][step.final_ids] = False


def check_partial_reset(trial: Trial) -> None:
    """An env that ends inside a chunk stops there and the other envs go on, as if stepped action by action."""
    env = trial.env
    for moment in trial.rollout:
        contract.check_executed(env, moment.step, trial.executed)
    if env.max_delay or env.spec.repeats == "none":
        return
    for k, (begin, end) in enumerate(trial.repeated_episodes):
        alone = trial.alone
        trial.reset(alone, PlanList(trial.plan_of_end(end, k), 1))
        for t in range(begin, end + 1):
            action, theirs = trial.rollout[t].action[k : k + 1], trial.rollout[t].step
            for e in range(int(theirs.num_steps_N[k])):
                mine = trial.step(alone, action[:, e : e + 1])
                same = bool((mine.reward_NE[0, 0] - theirs.reward_NE[k, e]).abs() <= 1e-3)
                last = t == end and e == int(theirs.num_steps_N[k]) - 1
                same &= bool(mine.terminated_N[0] | mine.truncated_N[0]) == last
                require(env, same, "a chunk must give the rewards and ends that its actions give one by one")


def check_seeding(trial: Trial) -> None:
    """An episode of each env repeats when it runs alone: the second episode, if later episodes repeat at all."""
    env, alone = trial.env, trial.alone
    if env.spec.repeats == "none":
        raise NotApplicable("its simulator says that it is not deterministic")
    for k, (begin, end) in enumerate(trial.repeated_episodes):
        obs = trial.reset(alone, PlanList(trial.plan_of_end(end, k), 1))
        for t in range(begin, end + 1):
            moment = trial.rollout[t]
            there = row_of(moment.obs, k)
            first = (t - begin) * trial.executed
            if not alike(obs, there):
                when = f"after {first} control steps" if first else "after the reset"
                require(env, False, f"{FUNCTION_OF_ITS_PLAN}; {when} {difference(obs, there)}")
            mine, theirs = trial.step(alone, moment.action[k : k + 1]), moment.step
            same = torch.allclose(mine.reward_NE[0], theirs.reward_NE[k], atol=1e-4)
            for name in ("terminated_N", "truncated_N", "num_steps_N"):
                same &= bool(getattr(mine, name)[0] == getattr(theirs, name)[k])
            between = f"between control steps {first} and {first + trial.executed}"
            require(env, same, f"{FUNCTION_OF_ITS_PLAN}; rewards or ends differ {between}")
            obs = mine.obs
        require(env, alike(mine.final_obs, trial.final_row(end, k)), FUNCTION_OF_ITS_PLAN + " (see its final_obs)")


def check_exact_resume(trial: Trial) -> None:
    """A state that was saved in the middle of a run continues exactly in another env."""
    if not trial.env.resumes_exactly:
        raise NotApplicable("a resumed run starts new episodes")
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
        require(env, same, "an env that has loaded a state must go on exactly")
        obs = mine.obs


def check_rendering(trial: Trial) -> None:
    """Images for people have the requested size and are not blank, after resets and after every control step."""
    env = trial.build(trial.num_envs)
    if env.film is None:
        raise NotApplicable("it cannot be rendered")
    width, height = FILM_SIZE
    render = env.film(width, height)
    obs = trial.reset(env, trial.recording())
    frames = [trial.apart(render)]
    env.on_control_step = lambda stepped: frames.append(render())
    step = trial.step(env, trial.actions(obs, 0))
    env.on_control_step = None
    require(
        env,
        len(frames) - 1 == int(step.num_steps_N.max()),
        "on_control_step must be called once after every control step",
    )
    for frame in frames:
        expected = (env.num_envs, height, width, 3)
        require(
            env,
            frame.shape == expected and frame.dtype == np.uint8,
            f"a picture is {frame.dtype} {list(frame.shape)}, must be uint8 {list(expected)}",
        )
    require(env, any(frame.min() < frame.max() for frame in frames), "every picture is of one colour")
    require(env, len(env.instruction_texts) == env.num_envs, "instruction_texts must have one text per env")


def check_closing(trial: Trial) -> None:
    """``close`` ends all threads and processes and closes all files; a second call does nothing."""
    assert trial.rollout  # libraries have started their threads
    before = held.counts()
    env = trial.make(trial.num_envs)
    with closing(env):
        trial.step(env, trial.actions(trial.reset(env, trial.recording()), 0))
    env.close()
    name = env.spec.task
    del env
    gc.collect()
    after = held.counts()
    for what, count in after.items():
        slack = 0 if what == "processes" else MAX_LEFT_OVER
        kept = count <= before[what] + slack
        require(trial.env, kept, f"{name} had {before[what]} {what} before it was built and {count} after close")


def check_leaks(trial: Trial) -> None:
    """Memory, processes, threads and files do not grow with the number of episodes."""
    env = trial.build(trial.num_envs)
    sampler = Recording(env.spec, env.num_envs, trial.seed, limit=1)
    obs, before, memory = trial.reset(env, sampler), held.counts(), held.memory_bytes()
    resets, warm, t = 0, 0, 0
    while resets < trial.resets and not trial.is_late():
        actions = trial.actions(obs, t)
        step = trial.step(env, actions if env.max_delay else actions[:, :1])
        obs, resets, t = step.obs, resets + len(step.final_ids), t + 1
        require(env, len(step.final_ids) > 0, "episodes of one control step did not end")
        if not warm and resets >= trial.resets // 5:  # caches are full
            warm, before, memory = resets, held.counts(), held.memory_bytes()
    grown = held.memory_bytes() - memory
    require(
        env,
        grown <= LEAK_BYTES,
        f"memory has grown by {grown / 1e6:.0f} MB over {resets - warm} episodes, "
        f"{grown / max(1, resets - warm) / 1e3:.0f} kB each",
    )
    for what, count in held.counts().items():
        kept = count <= before[what] + MAX_LEFT_OVER
        require(env, kept, f"{what} have grown from {before[what]} to {count} over {resets - warm} episodes")
    if resets < trial.resets:
        raise Shortened(f"{resets} resets instead of {trial.resets}, for lack of time (max_minutes=)")
