"""Cost of the flow policy's exploration and of its sampling.

    sde_one_step_over_full_chain   seconds of a PPO update of Flow-SDE with one stochastic step / with all K
    sample_over_bare_forward       chunks sampled per second / chunks per second of K bare denoiser passes

An update is PPO with its default options on a batch of the default size, critic and optimiser included. One stochastic
step saves a part of the denoiser's cost. The first ratio is therefore that of a policy whose denoiser outweighs the
rest, as the action expert of a VLA does (EXPERT). The default policy encodes the state once per decision and denoises
with a small head, so its full chain costs little more than one step. Rows give its ratio too, and the ratios of the
likelihood alone (forward and backward, no critic, no optimiser).

Sampling is that of the default policy. A bare pass is one call of the denoiser's encoder and head. Sampling encodes the
state once, and adds the normaliser, K stochastic steps, the likelihood and the critic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from embodied.algos.ppo import PPO
from embodied.algos.ppo_config import PPOConfig
from embodied.benchmarks.fragments import fragment_of
from embodied.benchmarks.measure import Report, paired, timed
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment, Obs
from embodied.policies import FlowConfig, FlowPolicy
from embodied.runtime import threads

SPEC = EnvSpec.of_sizes("bench", state=40, privileged=8, action=4, max_episode_steps=80)
DECISIONS, ENVS = 4, 512
EXPERT = {"head_hidden": (512, 512, 512)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the benchmark."""

    envs: int = ENVS
    """Envs of a batch, with DECISIONS each."""
    sampled: int = 256
    """Chunks per call of ``act``."""
    repeats: int = 20
    """Calls of ``act`` per measure."""
    rounds: int = 9
    """Rounds that count, see measure.py."""


def measure(short: bool) -> Report:
    """Measure all ratios and rows; ``short`` only shows that it works."""
    sizes = Sizes(envs=4, sampled=4, repeats=2, rounds=2) if short else Sizes()
    report = Report("flow")
    threads.use(1)  # as actor and learner have if they share cores
    report.ratio("sde_one_step_over_full_chain", updates(report, sizes, "expert", EXPERT))
    updates(report, sizes, "default", {})
    sampling(report, sizes)
    return report


def updates(report: Report, sizes: Sizes, policy_name: str, options: dict[str, Any]) -> float:
    """Measure updates and likelihoods of Flow-SDE with one and with all stochastic steps; return the updates' ratio."""
    seconds: dict[str, Callable[[], float]] = {}
    likelihood: dict[str, Callable[[], float]] = {}
    settings: dict[str, Any] = {"envs": sizes.envs, "decisions": DECISIONS, "threads": 1}
    for name in ("one", "all"):
        torch.manual_seed(0)
        config = FlowConfig(exploration="flow_sde", stochastic_steps=name, **options)
        policy = FlowPolicy(SPEC, config)
        algorithm = PPO(policy, PPOConfig(critic_learning_rate=7e-4, learning_rate=0.0, schedule="fixed"), seed=0,
                        device=torch.device("cpu"))  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        fragment = fragment_of(policy, observe(DECISIONS * sizes.envs, generator), DECISIONS, generator)
        seconds[name] = partial(timed, partial(algorithm.update, [fragment], 0))
        likelihood[name] = partial(timed, partial(backward, policy, fragment))
        settings |= {"denoise_steps": config.denoise_steps, "head_hidden": list(config.head_hidden)}
    ratios = {}
    for label, measures in (("update", seconds), ("likelihood", likelihood)):
        results = report.measure(measures, sizes.rounds, "ms", settings, f"{policy_name}_{label}_{{}}", 1e3)
        ratios[label] = paired(results["one"], results["all"])
        report.add(f"{policy_name}_{label}_one_over_all", ratios[label], "ratio", **settings, rounds=sizes.rounds)
    return ratios["update"]


def backward(policy: FlowPolicy, fragment: Fragment) -> None:
    """Compute the gradient of the summed log-probability of a fragment's decisions."""
    obs = {key: value.flatten(0, 1) for key, value in fragment.obs.items()}
    torch.autograd.backward(policy.evaluate(obs, fragment.chain.flatten(0, 1)).log_prob_B.sum())


def observe(num: int, generator: torch.Generator) -> Obs:
    """Draw random observations [num, ...] of SPEC."""
    return {
        "state": torch.randn(num, SPEC.state_dim, generator=generator),
        "privileged": torch.randn(num, SPEC.privileged_dim, generator=generator),
    }


def sampling(report: Report, sizes: Sizes) -> None:
    """Measure ``act`` of the default policy, and K passes of its denoiser alone."""
    torch.manual_seed(0)
    policy = FlowPolicy(SPEC, FlowConfig())
    generator = torch.Generator().manual_seed(0)
    obs = observe(sizes.sampled, generator)
    noise = torch.randn(sizes.sampled, *policy.noise_shape, generator=generator)
    x = noise[:, 0].flatten(1)

    @torch.no_grad()
    def passes() -> None:
        for k in range(policy.denoise_steps):
            code = policy.denoiser.encode(obs["state"])
            policy.denoiser.predict(code, policy.denoiser.features(code, x, policy.grid_features[k]))

    def speed(work: Callable[[], object]) -> float:
        return sizes.repeats * sizes.sampled / timed(lambda: [work() for _ in range(sizes.repeats)])

    settings = {"rows": sizes.sampled, "denoise_steps": policy.denoise_steps, "threads": 1}
    measures = {"sampled": lambda: speed(lambda: policy.act(obs, noise)), "bare_forward": lambda: speed(passes)}
    results = report.measure(measures, sizes.rounds, "chunks/s", settings)
    report.ratio("sample_over_bare_forward", paired(results["sampled"], results["bare_forward"]))
