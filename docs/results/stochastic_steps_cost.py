"""What does each choice of ``policy.stochastic_steps`` cost ``vla_tiny`` in the actor and in the learner?

python docs/results/stochastic_steps_cost.py <file to write>

``act`` on 64 decisions, and an update of PPO on 128 decisions, 16 observations eight times: vision and language are
frozen, and the actor passes their outputs on. Flow-SDE, 4 or 10 denoise steps, in turns on one thread. Ratios to
``one`` are medians over rounds, so they are valid beside other programs; seconds are not.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from embodied.algos.ppo import PPO
from embodied.benchmarks.gpu import observed, random_fragment
from embodied.benchmarks.measure import Report, in_turns, paired, timed
from embodied.core.spec import EnvSpec, Instruction
from embodied.policies import POLICIES
from embodied.policies.vla.policy import VLAPolicy
from embodied.report.metrics import write_json
from embodied.runtime import threads
from embodied.session.config import compose_run

INSTRUCTIONS = tuple(
    f"{words} the {colour} {shape}" for colour in ("red", "green", "blue", "yellow") for shape in ("cube", "ball")
    for words in ("take", "pick up", "please reach out for and pick up")
)  # fmt: skip
RECIPE = {"task": "tabletop", "policy": "vla_tiny", "init": "a run of imitation"}
ACTED, DECISIONS, ENVS, ROUNDS = 64, 8, 16, 5
CPU = torch.device("cpu")
MODES: dict[str, dict[str, Any]] = {
    "one": {"stochastic_steps": "one"},
    "last": {"stochastic_steps": "last"},
    "all": {"stochastic_steps": "all"},
    "all_checkpointed": {"stochastic_steps": "all", "checkpoint_steps": True},
}


def make_policy(**options: Any) -> VLAPolicy:
    """Build the policy of the recipe with other ``options``, for a task with two cameras."""
    found = compose_run(RECIPE).policy
    config = replace(found.options, **options)
    spec = EnvSpec.of_sizes(
        "bench", state=23, privileged=40, action=4, max_episode_steps=80, cameras=config.observed_cameras,
        instructions=tuple(Instruction(text, goal=text) for text in INSTRUCTIONS),
    )  # fmt: skip
    torch.manual_seed(0)
    policy = POLICIES[found.name].build(spec, config)
    assert isinstance(policy, VLAPolicy)
    return policy


def measure() -> Report:
    report = Report("stochastic steps")
    recipe = compose_run(RECIPE)
    still = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "schedule": "fixed", "critic_warmup": 0}
    config = replace(recipe.algo.options, **still)
    for k in (4, 10):
        acts, updates = {}, {}
        for name, options in MODES.items():
            policy = make_policy(denoise_steps=k, **options)
            obs = observed(policy, ACTED, CPU)
            noise = torch.randn(ACTED, *policy.noise_shape, generator=torch.Generator().manual_seed(0))
            acts[name] = partial(timed, partial(policy.act, obs, noise))
            algorithm = PPO(policy, config, seed=0, device=CPU)
            updates[name] = partial(
                timed, partial(algorithm.update, [random_fragment(policy, DECISIONS, ENVS, CPU)], 0)
            )
        settings = {"denoise_steps": k, "exploration": "flow_sde", "rounds": ROUNDS, "threads": 1}
        for part, measures, decisions in (("act", acts, ACTED), ("update", updates, DECISIONS * ENVS)):
            results = in_turns(measures, ROUNDS)
            for name, values in results.items():
                report.add(f"{part}_{name}_K{k}", 1e3 * median(values), "ms", decisions=decisions, **settings)
                report.ratio(f"{part}_{name}_over_one_K{k}", paired(values, results["one"]))
    return report


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    threads.use(1)
    write_json(Path(sys.argv[1]), measure().to_mapping())
