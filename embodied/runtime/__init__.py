"""Runtimes: where the parts of a run live and how their calls travel.

    from embodied.runtime import checkpoint
    from embodied.runtime.config import LocalConfig
    from embodied.runtime.recipe import Recipe
    from embodied.runtime.registry import build_runtime

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
