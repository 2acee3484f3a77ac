"""The Adam optimiser of PPO and its adaptive learning rate, and the average of weights over updates."""

import inspect
from typing import Any, TypeVar

import torch
from torch import nn

from embodied.algos.config import PPOConfig
from embodied.core.policy import Policy

LEARNING_RATE_FACTOR = 1.5  # of one change of the adaptive schedule, as in rsl_rl
Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])


def eager(kind: Kind) -> Kind:
    """Return an optimiser without what torch wraps around its methods for ``torch.compile``.

    At the first call the wrappers import torch's compiler, which takes more than a second of every start.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)  # type: ignore[return-value]


Adam, AdamW = eager(torch.optim.Adam), eager(torch.optim.AdamW)


def build_adam(policy: nn.Module, config: PPOConfig) -> torch.optim.Adam:
    """Build Adam over the trainable parameters.

    Parameters named ``critic.*`` are a second group if they have their own learning rate.
    """
    actor: list[nn.Parameter] = []
    critic: list[nn.Parameter] = []
    for name, parameter in policy.named_parameters():
        own_rate = config.critic_learning_rate is not None and name.startswith("critic.")
        if parameter.requires_grad:
            (critic if own_rate else actor).append(parameter)
    groups: list[dict[str, Any]] = [{"params": actor, "lr": config.learning_rate}]
    if critic:
        groups.append({"params": critic, "lr": config.critic_learning_rate})
    return Adam(groups, eps=1e-5, fused=True)


def adapt_learning_rate(optimizer: torch.optim.Adam, kl: float, config: PPOConfig) -> None:
    """Keep the KL of a minibatch near ``desired_kl`` (rule of rsl_rl); a critic's own learning rate does not change.

    A rate outside the bounds of the schedule may only come closer to them.
    """
    group = optimizer.param_groups[0]
    rate = group["lr"]
    if kl > 2 * config.desired_kl:
        group["lr"] = max(min(config.min_learning_rate, rate), rate / LEARNING_RATE_FACTOR)
    elif kl < config.desired_kl / 2:
        group["lr"] = min(max(config.max_learning_rate, rate), rate * LEARNING_RATE_FACTOR)


@torch.no_grad()
def update_average(average: Policy, policy: Policy, decay: float) -> None:
    """Fold the policy's present weights into an average of them; copy its buffers. Weights not trained are shared."""
    for mean, weight in zip(average.parameters(), policy.parameters(), strict=True):
        if weight.requires_grad:
            mean.lerp_(weight, 1 - decay)
    for copy, buffer in zip(average.buffers(), policy.buffers(), strict=True):
        copy.copy_(buffer)
