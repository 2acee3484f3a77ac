"""Runtimes: where the parts of a run live and how their calls travel.

Public API::

    from embodied.runtime import LocalConfig, Recipe, build_runtime, checkpoint, evaluate

    recipe = Recipe(LocalConfig(decisions=32, max_staleness=1), num_envs=1024, seed=0, make_env=..., ...)
    with build_runtime(recipe) as runtime:
        found = checkpoint.load_latest(run_dir)           # None if there is no checkpoint
        if found:
            runtime.load_state_dict(found.state)
        for iteration in runtime.iterations(max_env_steps=2_000_000, stop_event=stop):
            ...                                           # iteration.index .env_steps .metrics .episodes .evaluation
            checkpoint.save(run_dir, runtime.env_steps, runtime.state_dict())

``torch.manual_seed(seed)`` is called before ``make_policy``. Checkpoint keys are ``policy``, ``algorithm`` and
``runtime``; ``checkpoint.load_latest(run_dir, only="policy")`` is enough for an evaluation.
"""

from typing import TYPE_CHECKING

from embodied.core.lazy import lazy_names
from embodied.runtime.config import LocalConfig, RuntimeConfig
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.registry import RUNTIMES, build_runtime

if TYPE_CHECKING:
    from embodied.runtime.evaluator import evaluate
    from embodied.runtime.loop import Iteration, Runtime
    from embodied.runtime.recipe import EnvFactory, Recipe
else:
    __getattr__ = lazy_names(
        __name__,
        {"EnvFactory": "recipe", "Iteration": "loop", "Recipe": "recipe", "Runtime": "loop", "evaluate": "evaluator"},
    )

__all__ = [
    "RUNTIMES", "EnvFactory", "Iteration", "LocalConfig", "RayConfig", "Recipe", "Runtime", "RuntimeConfig",
    "build_runtime", "evaluate",
]  # fmt: skip
