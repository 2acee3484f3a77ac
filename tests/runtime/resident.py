"""Check an environment on a device that is none, and train there.

    python -m tests.runtime.resident <policy>,<runtime>,<max_staleness> ...

Prints as JSON, for each of these trainings, where the tensors of the learner's fragments were, what travelled between
device and CPU, and how far the weights are from those of the same training on the CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.collect import CollectConfig, record
from embodied.core.algorithm import Metrics
from embodied.core.device import CPU
from embodied.core.execution import EvalRollout
from embodied.core.policy import Policy
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment
from embodied.envs.checks.conformance import check_env
from embodied.envs.episodes.sampler import first_episodes
from embodied.policies.flow.policy import FlowConfig, FlowPolicy
from embodied.runtime import recipe
from tests.runtime import other_device
from tests.runtime.builders import build, iterate, make_policy
from tests.runtime.point_env import PointEnv


def make_flow(spec: EnvSpec) -> Policy:
    return FlowPolicy(spec, FlowConfig(horizon=3, execute=2, actor_hidden=(16,), head_hidden=(8,), critic_hidden=(16,)))


class Watching(PPO):
    """Keeps where the tensors of fragments are."""

    seen: set[tuple[str, str]]

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        for fragment in fragments:
            tensors = {"obs": fragment.obs["state"], "last_obs": fragment.last_obs["state"], "chain": fragment.chain}
            if fragment.final_obs:
                tensors["final_obs"] = fragment.final_obs["state"]
            tensors |= {"action": fragment.action_TNEA, "value": fragment.value_TN, "reward": fragment.reward_TNE}
            self.seen |= {(name, tensor.device.type) for name, tensor in tensors.items()}
        return super().update(fragments, version)


def train(device: torch.device, policy: str, name: str, max_staleness: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train on a device; return what was seen of it, and the weights."""
    seen: set[tuple[str, str]] = set()

    config = PPOConfig(epochs=2, num_minibatches=2, critic_warmup=1, critic_learning_rate=1e-3)

    def make_algorithm(policy: Policy) -> PPO:
        algorithm = Watching(
            policy,
            config,
            seed=3,
            device=device,
        )
        algorithm.seen = seen
        return algorithm

    recipe.resolve_device = lambda *_: device
    with build(
        lambda num_envs, _: PointEnv(num_envs, device=device),
        make_algorithm,
        make_flow if policy == "flow" else make_policy,
        name=name,
        max_staleness=max_staleness,
        eval_every=0,
    ) as runtime:
        iterate(runtime, 6)
        found = {"places": sorted(seen), "transfers": [transfer._asdict() for transfer in other_device.TRANSFERS]}
        return found, {key: value.cpu().double() for key, value in runtime.policy.state_dict().items()}


def evaluate_while_training(device: torch.device, policy: str, name: str) -> Any:
    """Return the result of the first evaluation during training on a device, of policy and envs there."""
    recipe.resolve_device = lambda *_: device
    with build(
        lambda num_envs, _: PointEnv(num_envs, device=device),
        lambda policy: PPO(policy, PPOConfig(learning_rate=0.0), seed=3, device=device),
        make_flow if policy == "flow" else make_policy,
        name=name,
        make_eval_env=lambda num_envs, _: PointEnv(num_envs, device=device),
        eval_every=1,
        eval_noise="seeded",
    ) as runtime:
        assert {weight.device.type for weight in runtime.evaluator.policy.parameters()} == {device.type}
        return next(iteration.evaluation for iteration in runtime.iterations() if iteration.evaluation)


def record_there(device: torch.device) -> None:
    """Record what a deployed policy meets, on its own device, and what an expert meets, on the CPU."""
    env = PointEnv(3, device=device)
    for place in (CPU, device):
        plans, policy = first_episodes(env.spec, 3, seed=0), make_policy(env.spec).to(place)
        rollout = EvalRollout(policy, env, plans, seeded=True)
        seen = [rollout.obs["state"]] + [rollout.step().obs["state"] for _ in range(3)]
        assert torch.cat(seen).device.type == place.type
    zeros = torch.zeros(3, env.spec.action_dim, device=device)
    for episode in record(env, lambda obs: zeros, CollectConfig(out="", noise=0.5), seed=0):
        assert episode.state_LS.device == episode.action_LA.device == CPU


def watch(device: torch.device, policy: str, name: str, max_staleness: int) -> dict[str, Any]:
    """Train and evaluate on the device and on the CPU; return what was found."""
    other_device.TRANSFERS.clear()
    found, there = train(device, policy, name, max_staleness)
    _, here = train(CPU, policy, name, max_staleness)
    difference = max(float((there[key] - here[key]).abs().max()) for key in here)
    evaluations = [evaluate_while_training(place, policy, name) for place in (device, CPU)]
    return found | {"difference": difference, "evaluations": evaluations}


def main() -> None:
    device = other_device.start()
    check_env(lambda num_envs: PointEnv(num_envs, device=device))
    record_there(device)
    cases = [word.split(",") for word in sys.argv[1:]]
    print(json.dumps([watch(device, policy, name, int(staleness)) for policy, name, staleness in cases]))


if __name__ == "__main__":
    main()
