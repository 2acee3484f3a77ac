"""From a run to a bundle: the observations that its policy meets, its options, where it comes from, and the export.

run ── bundle_source ──► Source ── write_bundle ──► files ── open_runner ──► the outputs of torch? ──► parity_max
"""

from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from math import ceil
from pathlib import Path

import torch

from embodied.algos.config import SupervisedConfig
from embodied.core.device import CPU
from embodied.core.execution import EvalRollout, obs_to
from embodied.core.policy import Policy
from embodied.core.types import Obs
from embodied.deployment.bundle.description import Bundle, Origin
from embodied.deployment.bundle.format import write_description
from embodied.deployment.bundle.runner import check_parity
from embodied.deployment.bundle.write import Source, write_bundle
from embodied.runtime.checkpoint import Checkpoint
from embodied.session.config import RunConfig
from embodied.session.deployed.runners import open_runner
from embodied.session.factories import acting_device, evaluation_plans, make_acting_env, make_spec
from embodied.session.files import read_json

LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "mujoco", "numpy")


def export_bundle(path: Path, source: Source, layout: str = "onnx") -> Bundle:
    """Write a bundle into an empty directory and compare its runner with torch; return its description.

    UserError if their outputs differ by more than ``embodied.deployment.bundle.write.TOLERANCE``.
    """
    bundle = write_bundle(path, source, layout)
    bundle = replace(bundle, parity_max=check_parity(open_runner(path), path))
    write_description(path, bundle)
    return bundle


def bundle_source(config: RunConfig, policy: Policy, origin: Origin, episodes: int) -> Source:
    """Record ``episodes`` episodes of the policy; return all that its bundle is written from."""
    return Source(
        policy=policy,
        spec=make_spec(config),
        recorded=record(config, policy, episodes),
        origin=origin,
        policy_section=config.policy.to_mapping(),
        simulation={"task": config.task.to_mapping(), "sim": config.sim.to_mapping()},
        noise=config.runtime.eval_noise,
        max_delay=config.max_delay,
        seed=config.seed,
    )


def record(config: RunConfig, policy: Policy, episodes: int) -> Obs:
    """Return the observations of all decisions of the deployed policy in ``episodes`` episodes, [F, ...].

    It acts with the noise of evaluations, on the run's device; observations and policy are on the CPU afterwards.
    """
    seeded = config.runtime.eval_noise == "seeded"
    policy.to(acting_device(config))
    with closing(make_acting_env(config, episodes)) as env:
        rollout = EvalRollout(policy, env, evaluation_plans(env.spec, episodes, config.seed), seeded=seeded)
        seen = []
        for _ in range(ceil(env.spec.max_episode_steps / policy.execute)):
            seen.append(obs_to(rollout.obs, CPU))
            rollout.step()
    policy.cpu()
    return {key: torch.cat([obs[key] for obs in seen]) for key in seen[0] if key != "privileged"}


def origin_of(config: RunConfig, run_dir: Path, found: Checkpoint) -> Origin:
    success = read_json(run_dir / "eval" / f"final_{found.env_steps}.json").get("success_at_end")
    versions = {name: version(name) for name in LIBRARIES}
    names = config.task.title, config.policy.name, str(run_dir), found.path.name
    env_steps = 0 if isinstance(config.algo.options, SupervisedConfig) else found.env_steps  # those are its updates
    return Origin(*names, env_steps, success, versions)
