"""Videos of the episodes of a run, each below its instruction."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from embodied.core.env import VecEnv
from embodied.core.errors import UserError
from embodied.core.policy import Policy
from embodied.report.progress import Line
from embodied.report.video import Pixels, caption, record
from embodied.runtime.config import EvalNoise
from embodied.session.config import RunConfig
from embodied.session.factories import evaluation_plans, make_acting_env

ENVS = 4  # side by side in the video of an evaluation
SIZE = (320, 240)  # width and height of an episode, pixels


@contextmanager
def filming(
    config: RunConfig, num_envs: int, delay: int | None = None, quickly: bool = False
) -> Iterator[tuple[VecEnv, Callable[[], Pixels]]]:
    """Build environments; yield them and what renders them. UserError if they cannot be rendered.

    delay: see ``make_acting_env``. quickly: without shadows, where the environments can.
    """
    with closing(make_acting_env(config, num_envs, delay=delay)) as env:
        renderer = (env.film_quickly if quickly else None) or env.film
        if renderer is None:
            raise UserError(f"the environments of task {config.task.title} cannot be rendered")
        render = renderer(*SIZE)
        yield env, lambda: caption(render(), env.instruction_texts)


def film_evaluation(
    env: VecEnv, render: Callable[[], Pixels], policy: Policy, path: Path, seed: int, noise: EvalNoise, first: int = 0
) -> None:
    """Write a video of episodes of an evaluation, from ``first`` on, side by side."""
    plans = evaluation_plans(env.spec, first + env.num_envs, seed).rows(slice(first, None))
    with closing(Line()) as line:
        watch = line.evaluating("1 episode" if env.num_envs == 1 else f"{env.num_envs} episodes", "filmed")
        record(env, render, policy, plans, [path], seeded=noise == "seeded", watch=watch)
