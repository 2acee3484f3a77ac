"""Record a scripted expert: ``python -m embodied.collect task=pick_place out=demos/pick_place [key=value ...]``

  episodes=20  seed=0       number of episodes to keep, and seed of their initial states; they are spread as equally
                            as possible over the goals that are trained on
  noise=0.1                 share of time in which random actions are executed; the expert's actions are recorded
  noise_steps=4             length of each such disturbance, control steps
  hold_steps=10             an episode is cut this many control steps after its last unsolved step
  cameras=[]                also record the images of these cameras, such as [front,wrist]; the recorded state is then
                            that of a policy with cameras, without the terms that only a simulator can observe
  image_size=64             width and height of the images, pixels
  keep_failures=false       also keep episodes that do not end solved
  expert=module:function    an expert of your own, for a task without one: it gets the parts of the state by name,
                            each [N, size], and returns actions [N, A] in [-1, 1]
  device=auto               device of a simulator that has one: cpu, cuda or cuda:<index>
  num_threads=0             threads of the simulation; 0 is all cores
  task.<option>=...         any option of the task
  sim.<option>=...          any option of the simulator
  randomization=sim2real    what varies between episodes; none by default

Disturbances lead to the states that a learner's mistakes lead to. The expert shows the way back from them (DART:
Laskey et al. 2017). Episodes are recorded in parallel, so more may be solved than are kept.
Last line of stdout: {"data", "task", "episodes", "frames", "tried", "solved", "success_rate", "wall_s"}.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.config import PRESETS, parse_overrides
from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.episodes import PlanList
from embodied.core.errors import UserError, one_line
from embodied.core.execution import obs_to, timestep_to
from embodied.core.options import FractionBelow1, NonNegativeInt, PositiveInt, Seed, config_dataclass
from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.spec import SUCCESS, TRAIN, Box, CameraSpec, EnvSpec, slices_of
from embodied.core.types import Obs
from embodied.core.user_files import refuse_places
from embodied.data import Episode, write
from embodied.data.lerobot import DISTURBANCE, PLAN
from embodied.envs.episodes.sampler import first_episodes
from embodied.report.progress import duration
from embodied.runtime import threads
from embodied.session.command import run_command, split_words
from embodied.session.config import RunConfig, compose_run, words_of_environment
from embodied.session.factories import make_env, make_spec
from embodied.session.files import check_new_dir

MAX_TRIES = 20  # episodes tried per requested episode before the command gives up
Expert = Callable[[Mapping[str, Tensor]], Tensor]
"""Returns actions [N, A] for the parts of the state by name, each [N, size]."""
SPARE = 8  # episodes tried per missing episode; never more at once than were requested


@config_dataclass
class CollectConfig:
    out: str
    episodes: PositiveInt = 20
    seed: Seed = 0
    noise: FractionBelow1 = 0.1
    noise_steps: PositiveInt = 4
    hold_steps: NonNegativeInt = 10
    cameras: tuple[str, ...] = ()
    image_size: PositiveInt = 64
    keep_failures: bool = False
    expert: str | None = None
    num_threads: NonNegativeInt = 0


def collect(argv: Sequence[str]) -> dict[str, Any]:
    """Record and write a data set; return the command's result. UserError for bad input, with nothing written."""
    began = time.monotonic()
    options, words = split_words(parse_overrides(argv), CollectConfig, ("task", "sim", "device", PRESETS))
    refuse_places()
    config = compose_run(words)
    out = Path(options.out)
    check_new_dir(out)
    num_threads = options.num_threads or threads.available_cores()
    threads.use(1)
    cameras = [CameraSpec.square(name, options.image_size) for name in options.cameras]
    own_expert = None if options.expert is None else import_expert(options.expert)
    env, act = make_demonstrating(config, options.episodes, num_threads, cameras, own_expert)
    spec, missing = env.spec, shares(env.spec, options.episodes)
    kept: list[Episode] = []
    tried = solved = 0
    while len(kept) < options.episodes:
        few = min(options.episodes, SPARE * (options.episodes - len(kept)))
        if few < env.num_envs:  # few episodes are missing: a smaller pool is enough
            env.close()
            env, act = make_demonstrating(config, few, num_threads, cameras, own_expert)
        if tried >= MAX_TRIES * options.episodes:
            done = f"{solved} of {tried} episodes with noise={options.noise}"
            raise UserError(f"the expert of {spec.task} solved {done}: too few")
        for episode in record(env, act, options, first_env_seed(Purpose.DEMONSTRATIONS, options.seed) + tried):
            success = bool(episode.success_L[-1])
            goal = spec.goals[spec.texts.index(episode.instruction)] if spec.texts else spec.task
            solved += success
            if (success or options.keep_failures) and missing[goal]:
                missing[goal] -= 1
                kept.append(episode)
        tried += env.num_envs
        print(f"{len(kept)} of {options.episodes} episodes, {duration(time.monotonic() - began)}", file=sys.stderr)
    env.close()
    write(out, kept, spec, words_of_environment(words, config))
    return {
        "data": str(out), "task": spec.task, "episodes": len(kept), "frames": sum(map(len, kept)), "tried": tried,
        "solved": solved, "success_rate": solved / tried, "wall_s": round(time.monotonic() - began, 3),
    }  # fmt: skip


def make_demonstrating(
    config: RunConfig, num_envs: int, num_threads: int, cameras: Sequence[CameraSpec], own_expert: Expert | None
) -> tuple[VecEnv, Callable[[Obs], Tensor]]:
    """Build envs of the run's task, and what returns an expert's actions [N, A] for their latest observations.

    UserError unless an expert with continuous actions can succeed in them.
    """
    name, spec = config.task.name, make_spec(config, cameras)
    if not isinstance(spec.action, Box):
        raise UserError(f"task={name} has discrete actions, and demonstrations are of continuous ones")
    if not spec.has_success:
        raise UserError(f"task={name} reports no success, so it is not known which demonstrations to keep")
    env = make_env(config, num_envs, num_threads, cameras=cameras)
    if own_expert is not None:
        return env, partial(ask, own_expert, env)
    expert = env.expert
    if expert is None:
        env.close()
        raise UserError(f"task={name} has no scripted expert; give one of your own: expert=<module>:<function>")
    return env, lambda obs: expert()


def import_expert(name: str) -> Expert:
    """Return the function ``<module>:<function>``. UserError if there is none."""
    module, _, function = name.partition(":")
    try:
        expert: Expert = getattr(import_module(module), function)
    except Exception as error:  # third-party code may raise anything
        what = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"expert={name} must be <module>:<function>, importable from this folder: {what}") from error
    if not callable(expert):
        raise UserError(f"expert={name} is not a function")
    return expert


def ask(expert: Expert, env: VecEnv, obs: Obs) -> Tensor:
    """Return the actions of an expert of the user, [N, A], clipped to [-1, 1]. UserError for another shape, or NaN."""
    parts = {name: obs["state"][:, columns] for name, columns in slices_of(env.spec.state).items()}
    action_NA = torch.as_tensor(expert(parts), dtype=torch.float32)
    shape = (env.num_envs, env.spec.action_dim)
    if action_NA.shape != shape or action_NA.isnan().any():
        found = "NaN" if action_NA.shape == shape else str(list(action_NA.shape))
        raise UserError(f"the expert of {env.spec.task} must return actions {list(shape)}, got {found}")
    return action_NA.clamp(-1, 1)


def shares(spec: EnvSpec, episodes: int) -> dict[str, int]:
    """Return the number of episodes per goal that is trained on, as equal as possible.

    The remainder goes to goals spaced as far apart as possible in the task's order, so that every word occurs.
    """
    goals = dict.fromkeys(goal for goal, split in zip(spec.goals, spec.splits, strict=True) if split == TRAIN)
    goals = goals or {spec.task: None}
    upto = [i * episodes // len(goals) for i in range(len(goals) + 1)]
    return {goal: upto[i + 1] - upto[i] for i, goal in enumerate(goals)}


def record(env: VecEnv, act: Callable[[Obs], Tensor], options: CollectConfig, seed: int) -> list[Episode]:
    """Record one episode per env, by the actions of ``act`` with disturbances. Env i has seed ``seed + i``."""
    plans = first_episodes(env.spec, env.num_envs, seed, splits=(TRAIN,) if env.spec.instructions else None)
    obs = obs_to(env.reset(PlanList(plans, env.num_envs)), CPU)
    texts = [env.spec.texts[i] if env.spec.texts else env.spec.task for i in plans.instruction_n.tolist()]
    steps, num_envs = env.spec.max_episode_steps, env.num_envs
    disturbance = disturbances(env.spec, num_envs, options, np.random.default_rng(seed))
    states, actions, rewards, solved, added = [], [], [], [], []
    plan_NP = torch.from_numpy(np.stack([getattr(plans, field.name) for field in fields(plans)], -1))
    length_N = torch.full((num_envs,), steps)  # of each env's first episode
    images: dict[str, list[Tensor]] = {camera.name: [] for camera in env.spec.cameras}
    for t in range(steps):
        action_NA = act(obs).cpu()
        states.append(obs["state"])
        for camera, frames in images.items():
            frames.append(obs[f"images.{camera}"])
        actions.append(action_NA)
        executed_NA = torch.where(disturbance[:, t].isnan(), action_NA, disturbance[:, t])
        added.append(executed_NA - action_NA)
        step = timestep_to(env.step(executed_NA.to(env.device)), CPU)
        rewards.append(step.reward_N)
        solved.append(step.info[SUCCESS])
        obs = step.obs
        length_N[(length_N == steps) & (step.terminated_N | step.truncated_N)] = t + 1
    columns = [torch.stack(column, 1) for column in (states, actions, rewards, added, solved)]
    success_NL = columns[-1]
    episodes = []
    for i in range(num_envs):
        length = cut(success_NL[i, : length_N[i]], options.hold_steps)
        state, action, reward, more, success = (column[i, :length] for column in columns)
        extra = {DISTURBANCE: more, PLAN: plan_NP[i].expand(length, -1)}
        seen = {camera: torch.stack([frame[i] for frame in frames[:length]]) for camera, frames in images.items()}
        episodes.append(Episode(state, action, reward, success, texts[i], seen, extra))
    return episodes


def disturbances(spec: EnvSpec, num_envs: int, options: CollectConfig, random: np.random.Generator) -> Tensor:
    """Draw actions [N, T, A] to execute instead of the expert's; NaN keeps the expert's.

    A disturbance is one uniformly random action for ``noise_steps`` control steps. Actions whose name ends with
    ``gripper`` stay the expert's, because a dropped object costs more than a detour.
    """
    blocks = -(-spec.max_episode_steps // options.noise_steps)
    chosen = torch.from_numpy(random.random((num_envs, blocks)) < options.noise)
    action = torch.from_numpy(random.uniform(-1.0, 1.0, (num_envs, blocks, spec.action_dim))).float()
    action[~chosen] = torch.nan
    action[..., [name.endswith("gripper") for name in spec.action_names]] = torch.nan
    return action.repeat_interleave(options.noise_steps, 1)[:, : spec.max_episode_steps]


def cut(success_L: Tensor, hold_steps: int) -> int:
    """Return the length of an episode cut ``hold_steps`` after its last unsolved step; all of it unless it ends solved.

    success_L: whether the task is solved after each step.
    """
    unsolved = (~success_L).nonzero().squeeze(1)
    last = int(unsolved[-1]) if len(unsolved) else -1
    return len(success_L) if last == len(success_L) - 1 else min(len(success_L), last + 1 + max(1, hold_steps))


main = partial(run_command, collect, __doc__, first="task")

if __name__ == "__main__":
    sys.exit(main())
