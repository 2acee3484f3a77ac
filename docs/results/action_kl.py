"""How far does an update of PPO move the executed action of an imitated policy, beside the KL that it measures?

python docs/results/action_kl.py <file to write>

A flow policy imitates an expert whose actions have the standard deviation EXPERT_STD around a curve over the state.
PPO then raises the action, from a start at the lower bound of the learning rate, and the last of its updates is
measured. State and action have one dimension, so the densities of the action are histograms. The mean is over states.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.algos.config import PPOConfig
from embodied.algos.ppo import PPO
from embodied.core.episodes import EpisodeStats
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment
from embodied.policies.config import FlowConfig
from embodied.policies.flow.policy import FlowPolicy
from embodied.report.metrics import write_json

SPEC = EnvSpec.of_sizes("line", state=1, action=1)
EXPERT_STD, SIGMA_INIT = 0.05, 0.15
IMITATION_UPDATES, UPDATES, DECISIONS = 2000, 8, 1024
STATES, DRAWS, BIN = 8, 50_000, 0.005


def expert(state: Tensor) -> Tensor:
    """Return the mean action [N, 1] in states [N, 1]."""
    return 0.6 * torch.sin(3.0 * state)


def build(**options: Any) -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(SPEC, FlowConfig(horizon=1, execute=1, sigma_init=SIGMA_INIT, **options))
    policy.state_normalizer.fit(torch.linspace(-1.0, 1.0, 1001)[:, None])
    return policy


def imitate() -> dict[str, Tensor]:
    """Return the weights of an imitated policy, without critic and noise network."""
    policy, generator = build(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, IMITATION_UPDATES)
    for _ in range(IMITATION_UPDATES):
        state = 2.0 * torch.rand(256, 1, generator=generator) - 1.0
        action = expert(state) + EXPERT_STD * torch.randn(256, 1, generator=generator)
        optimizer.zero_grad()
        valid = torch.ones(256, 1, dtype=torch.bool)
        policy.imitation_loss({"state": state}, action[:, None], valid, generator).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return {name: value for name, value in policy.state_dict().items() if not name.startswith(policy.not_imitated)}


def decide(policy: FlowPolicy, state: Tensor, generator: torch.Generator, version: int) -> Fragment:
    """Draw a decision in each state [N, 1]; its reward is the action's distance above the expert's."""
    sample = policy.act({"state": state}, torch.randn(len(state), *policy.noise_shape, generator=generator))
    nothing = torch.zeros(1, len(state))
    return Fragment(
        obs={"state": state[None]},
        chain=sample.chain[None],
        log_prob_TN=sample.log_prob_N[None],
        value_TN=nothing,
        reward_TNE=(sample.action_NHA[:, 0] - expert(state))[None],
        num_steps_TN=nothing.long() + 1,
        terminated_TN=nothing == 0,
        truncated_TN=nothing > 0,
        final_value_TN=nothing,
        bootstrap_value_N=nothing[0],
        version_TN=nothing.long() + version,
        episodes=EpisodeStats.concatenate([]),
    )


def density(policy: FlowPolicy, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the action's bins from -2 to 2 in one state, and the draws."""
    noise = torch.randn(DRAWS, *policy.noise_shape, generator=torch.Generator().manual_seed(1))
    action = policy.act({"state": state.expand(DRAWS, 1)}, noise).action_NHA.flatten()
    count = torch.histc(action, round(4.0 / BIN), -2.0, 2.0) + 1e-2
    return count / count.sum(), action


@torch.no_grad()
def compare(before: FlowPolicy, after: FlowPolicy) -> dict[str, float]:
    """Return the measured KL and that of the executed action, nats, with the action's spread and shift."""
    states = torch.linspace(-0.9, 0.9, STATES)[:, None]
    many = {"state": states.repeat(2000, 1)}
    noise = torch.randn(len(many["state"]), *before.noise_shape, generator=torch.Generator().manual_seed(2))
    chain = before.act(many, noise).chain
    old, new = before.evaluate(many, chain), after.evaluate(many, chain)
    measured = before.kl_divergence(old.distribution, new.distribution).mean() / old.scored_share
    rows = []
    for state in states:
        (p, drawn), (q, moved) = density(before, state), density(after, state)
        rows.append([(p * (p / q).log()).sum(), drawn.std(), moved.mean() - drawn.mean()])
    executed, std, shift = torch.tensor(rows).mean(0).tolist()
    found = {"measured": float(measured), "executed": executed, "action_std": std, "action_shift": shift}
    return {key: round(value, 4) for key, value in found.items()}


def measure(imitated: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    policy, generator = build(**options), torch.Generator().manual_seed(3)
    policy.load_state_dict(imitated, strict=False)
    config = PPOConfig(gamma=1.0, value_coef=0.0, learning_rate=1e-5)
    algorithm = PPO(policy, config, seed=0, device=torch.device("cpu"))
    before = copy.deepcopy(policy)
    for version in range(UPDATES):
        before.load_state_dict(policy.state_dict())
        state = 2.0 * torch.rand(DECISIONS, 1, generator=generator) - 1.0
        algorithm.update([decide(policy, state, generator, version)], version)
    return options | compare(before, policy)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    imitated = imitate()
    modes = [(e, s, k) for e in ("flow_noise", "flow_sde") for s in ("all", "one", "last") for k in (4, 10)]
    rows = []
    for exploration, steps, k in modes:
        rows.append(measure(imitated, exploration=exploration, stochastic_steps=steps, denoise_steps=k))
        print(rows[-1], flush=True)
    settings = {"expert_std": EXPERT_STD, "sigma_init": SIGMA_INIT, "updates": UPDATES, "decisions": DECISIONS}
    write_json(Path(sys.argv[1]), {"settings": settings, "rows": rows})
