"""The Adam optimiser of PPO and its adaptive learning rate, and the average of weights over updates."""

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from embodied.algos.config import PPOConfig
from embodied.core.policy import Policy

HOLD = 100  # updates before learning rates fall: a short run needs them all
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


def build_adam(policy: nn.Module, config: PPOConfig, device: torch.device) -> torch.optim.Adam:
    """Build Adam over the trainable parameters, whose learning rates are tensors (``put_rates``).

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
    optimizer = Adam(groups, eps=1e-5, fused=True)
    optimizer._warned_capturable_if_run_uncaptured = True  # the first step of each shape is not recorded
    put_rates(optimizer, device)
    return optimizer


def put_rates(optimizer: torch.optim.Adam, device: torch.device) -> None:
    """Make the learning rates tensors on the device, so that a recorded step reads and adapts them."""
    on_gpu = device.type == "cuda"
    for group in optimizer.param_groups:  # Adam's kernel for CUDA reads a float32, that for the CPU any
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32 if on_gpu else torch.float64, device=device)
        group["capturable"] = on_gpu


def anneal(optimizer: torch.optim.Adam, share: Tensor, config: PPOConfig, version: int, total_updates: int) -> None:
    """Scale the learning rates for update ``version``, and ``share``, the scalar that says how much of them is left.

    It falls linearly from 1 at update ``HOLD`` to ``final_rate`` at the last one. Shorter runs keep 1.
    """
    falling = (version - HOLD) / (total_updates - HOLD) if total_updates > HOLD else 0.0
    left = 1 - (1 - config.final_rate) * min(max(falling, 0.0), 1.0)
    if config.schedule == "adaptive":
        optimizer.param_groups[0]["lr"].mul_(left / share)
    share.fill_(left)
    set_fixed_rates(optimizer, config, left)


def set_fixed_rates(optimizer: torch.optim.Adam, config: PPOConfig, share_left: float) -> None:
    """Set the learning rates that follow no KL to what is left of the configured ones."""
    actor, *critic = optimizer.param_groups
    if config.schedule == "fixed":
        actor["lr"].fill_(config.learning_rate * share_left)
    for group in critic:
        assert config.critic_learning_rate is not None
        group["lr"].fill_(config.critic_learning_rate * share_left)


def adapt_learning_rate(
    optimizer: torch.optim.Adam, kl: Tensor, adapts: Tensor, share: Tensor, config: PPOConfig
) -> None:
    """Keep the KL of a minibatch near ``desired_kl`` (rule of rsl_rl); a critic's own learning rate does not change.

    A rate outside the bounds of the schedule may only come closer to them. adapts: bool scalar; false changes nothing.
    share: of ``desired_kl`` and of the bounds that is left.
    """
    rate, kl = optimizer.param_groups[0]["lr"], kl.double() / share
    least, most = config.min_learning_rate * share, config.max_learning_rate * share
    lower = torch.maximum(torch.minimum(rate, least), rate / LEARNING_RATE_FACTOR)
    higher = torch.minimum(torch.maximum(rate, most), rate * LEARNING_RATE_FACTOR)
    far, near = adapts & (kl > 2 * config.desired_kl), adapts & (kl < config.desired_kl / 2)
    rate.copy_(torch.where(far, lower, torch.where(near, higher, rate)))


@torch.no_grad()
def update_average(average: Policy, policy: Policy, decay: float) -> None:
    """Fold the policy's present weights into an average of them; copy its buffers. Weights not trained are shared."""
    for mean, weight in zip(average.parameters(), policy.parameters(), strict=True):
        if weight.requires_grad:
            mean.lerp_(weight, 1 - decay)
    for copy, buffer in zip(average.buffers(), policy.buffers(), strict=True):
        copy.copy_(buffer)
