"""Every policy and algorithm on a device that is none, compared with the CPU.

    python -m tests.runtime.on_device [cuda:0]

Prints as JSON, by case, what it raised or how far its results are from those on the CPU. With an argument the device is
that one. What a GPU records (``core.graphs.Recorded``) must not wait for the device here.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from embodied.algos.config import GroundingConfig, GRPOConfig, PPOConfig, SFTConfig
from embodied.algos.grpo import GRPO
from embodied.algos.ppo import PPO
from embodied.algos.supervised import SFT, Grounding
from embodied.core.device import CPU, copied_to_cpu
from embodied.core.execution import obs_to
from embodied.core.graphs import Recorded
from embodied.core.policy import Policy
from embodied.core.spec import Discrete
from embodied.core.types import Fragment, Obs
from embodied.policies import POLICIES
from embodied.policies.categorical import CategoricalPolicy
from embodied.policies.config import CategoricalConfig
from tests.algos.fragments import SIZES, SPEC, prefixes, rollout
from tests.envs.randomised_on_device import randomise
from tests.policies import vla_builders
from tests.runtime import other_device

NUM = 8
Numbers = list[Tensor]
Build = Callable[[], Policy]


def shipped(name: str) -> Build:
    entry = POLICIES[name.split(",")[0]]
    return lambda: entry.build(SPEC, entry.config(**SIZES[name]))


def categorical() -> Policy:
    spec = replace(SPEC, action=Discrete(("a", "b", "c")))
    return CategoricalPolicy(spec, CategoricalConfig(actor_hidden=(16,), critic_hidden=(16,), horizon=2, execute=2))


def observe(policy: Policy) -> Obs:
    generator = torch.Generator().manual_seed(1)
    if policy.library is not None:
        return vla_builders.observe(NUM)
    obs = {"state": torch.randn(NUM, SPEC.state_dim, generator=generator)}
    obs["privileged"] = torch.randn(NUM, SPEC.privileged_dim, generator=generator)
    return obs | prefixes(NUM, getattr(policy, "max_delay", 0), generator)


def act_and_learn(build: Build, device: torch.device) -> Numbers:
    """Everything that runtime, evaluation and learner ask of a policy."""
    policy = fresh(build).to(device)
    obs, generator = obs_to(observe(policy), device), torch.Generator().manual_seed(2)
    if policy.precompute_in_actor or policy.fits_cache(NUM):
        obs = policy.precompute(obs)
    noise = torch.randn(NUM, *policy.noise_shape, generator=generator).to(device)
    recorded = Recorded(policy.act, device)
    sample = recorded(obs, noise)
    planned = torch.randn(NUM, *policy.plan_noise_shape, generator=generator).to(device)
    found = [*vars_of(sample), policy.plan(obs), Recorded(policy.plan, device)(obs, planned), policy.value(obs)]
    evaluation = policy.evaluate(obs, sample.chain)
    kl = policy.kl_divergence(evaluation.distribution, evaluation.distribution.detach() * 1.01)
    torch.autograd.backward(evaluation.log_prob_B.sum() + evaluation.value_B.sum() + kl.sum())
    policy.update_normalizer({key: value for key, value in obs.items() if key in ("state", "privileged")})
    return [*found, *vars_of(evaluation), kl, *gradients(policy), *policy.state_dict().values()]


def vars_of(result: Any) -> Numbers:
    values = [getattr(result, name) for name in result.__dataclass_fields__]
    return [value for value in values if isinstance(value, Tensor)]


def gradients(policy: Policy) -> Numbers:
    return [weight.grad for weight in policy.parameters() if weight.grad is not None]


def fresh(build: Build) -> Policy:
    torch.manual_seed(0)
    return build()


def reinforce(build: Build, kind: type[PPO], config: PPOConfig, device: torch.device, stale: bool) -> Numbers:
    """Two updates, and one more after a resume from a state on the CPU. Fragments are on the CPU, as Ray gives them."""
    policy = fresh(build)
    fragments = [fragment_of(policy, version) for version in range(3)]
    algorithm = kind(policy, config, seed=0, device=device)
    for version in range(2):
        algorithm.update([fragments[0 if stale else version]], version)
    state = copied_to_cpu(algorithm.state_dict())
    weights = copied_to_cpu(algorithm.deployed.state_dict())
    resumed = kind(fresh(build), config, seed=0, device=device)
    resumed.deployed.load_state_dict(weights)
    resumed.load_state_dict(state)
    resumed.update([fragments[2]], 2)
    return list(resumed.policy.state_dict().values())


def fragment_of(policy: Policy, seed: int) -> Fragment:
    if policy.library is None:
        return rollout(policy, seed=seed, version=seed, N=NUM)
    return rollout(policy, seed=seed, version=seed, T=2, N=NUM // 2, rows=observe(policy))


def imitate(build: Build, device: torch.device) -> Numbers:
    policy = fresh(build)
    obs, generator = observe(policy), torch.Generator().manual_seed(3)
    chunk = torch.rand(NUM, policy.horizon, SPEC.action_dim, generator=generator) * 2 - 1
    valid = torch.ones(NUM, policy.horizon, dtype=torch.bool)
    algorithm = SFT(policy, SFTConfig(updates=4), seed=0, device=device)
    algorithm.fit_normalizer({"state": obs["state"]})
    if policy.fits_cache(NUM):
        obs = policy.precompute(obs)
    losses = [algorithm.update(obs, chunk, valid) for _ in range(2)]
    state = copied_to_cpu(algorithm.state_dict())
    resumed = SFT(fresh(build), SFTConfig(updates=4), seed=0, device=device)
    resumed.load_state_dict(state)
    losses += [resumed.update(obs, chunk, valid), resumed.validate(obs, chunk, valid)]
    return [torch.tensor(losses), *resumed.weights().values()]


def ground(build: Build, device: torch.device) -> Numbers:
    policy = fresh(build)
    generator = torch.Generator().manual_seed(3)
    obs = observe(policy)
    for camera in vla_builders.CAMERAS:
        shape = (NUM, camera.height, camera.width)
        obs[f"masks.{camera.name}"] = torch.randint(0, 4, shape, generator=generator, dtype=torch.uint8)
        obs[f"described.{camera.name}"] = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8)
    obs["target_positions"] = torch.randn(NUM, 9, generator=generator)
    algorithm = Grounding(policy, GroundingConfig(updates=4, masks_only=0.5), seed=0, device=device)
    algorithm.fit_normalizer({key: obs[key] for key in ("state", "target_positions")})
    losses = [algorithm.update(obs) for _ in range(3)] + [algorithm.validate(obs)]
    algorithm.localization_rates(obs)
    return [torch.tensor(losses), algorithm.predict_positions(obs), *algorithm.weights().values()]


def saved(build: Build, device: torch.device) -> Numbers:
    """Return the weights that another library loads."""
    with tempfile.TemporaryDirectory() as folder:
        fresh(build).to(device).save_pretrained(Path(folder))
        return list(load_file(Path(folder) / "model.safetensors").values())


def cases() -> Iterator[tuple[str, Callable[[torch.device], Numbers]]]:
    """Names, and what gives numbers on a device."""
    frozen = {"freeze": vla_builders.FROZEN}
    builds: dict[str, Build] = {name: shipped(name) for name in SIZES} | {"categorical": categorical}
    builds |= {
        "vla": vla_builders.build,
        "vla, frozen": lambda: vla_builders.build(**frozen),
        "vla, LoRA": lambda: vla_builders.build(**frozen, lora_rank=2),
        "vla, prefix from the actor": lambda: vla_builders.build(**frozen, prefix_from_actor=True),
    }
    for name, build in builds.items():
        yield f"{name}: act and evaluate", partial(act_and_learn, build)
        if fresh(build).not_imitated is not None and name not in ("vla, LoRA", "vla, prefix from the actor"):
            yield f"{name}: sft", partial(imitate, build)
    few = {"epochs": 2, "num_minibatches": 2}
    configs: dict[str, PPOConfig] = {
        "warm-up of the critic": PPOConfig(critic_warmup=1, critic_learning_rate=1e-3, **few),
        "reference and average": PPOConfig(reference_kl_coef=0.1, ema_decay=0.9, num_minibatches=1, epochs=1),
        "end of the epochs": PPOConfig(target_kl=1e-4, value_loss="huber", value_clip=0.2, dual_clip=3.0, **few),
        "vtrace": PPOConfig(correction="vtrace", max_staleness=2, **few),
        "interpolated": PPOConfig(proximal="interpolate", entropy_coef=0.01, **few),
        "per action": PPOConfig(reduction="action", **few),
        "mean": PPOConfig(reduction="mean", schedule="fixed", **few),
        "aipo": PPOConfig(correction="aipo", **few),
    }
    for number, (title, config) in enumerate(configs.items()):
        name, stale = ("flow, one step", True) if number % 2 else ("gaussian", False)
        run = partial(reinforce, shipped(name), PPO, config, stale=stale)
        yield f"{name}: ppo, {title}", run
    small = PPOConfig(epochs=1, num_minibatches=2)
    for name in ("vla", "vla, frozen", "dsrl", "flow, delays", "categorical"):
        yield f"{name}: ppo", partial(reinforce, builds[name], PPO, small, stale=False)
    yield (
        "gaussian: grpo",
        partial(reinforce, shipped("gaussian"), GRPO, GRPOConfig(group_size=4, epochs=2), stale=False),
    )
    yield "vla, LoRA: saved", partial(saved, builds["vla, LoRA"])
    yield "vla: grounding", partial(ground, vla_builders.build)
    yield "randomised simulation", randomise


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device(sys.argv[1]) if len(sys.argv) > 1 else other_device.start()
    found: dict[str, Any] = {}
    for name, run in cases():
        try:
            here, there = ([value.detach().cpu().double() for value in run(place)] for place in (CPU, device))
            found[name] = max(float((a - b).abs().max()) for a, b in zip(here, there, strict=True))
        except Exception:  # any kind: the test names it
            found[name] = traceback.format_exc()[-1500:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
