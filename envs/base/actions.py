"""Chunks of actions that an environment is given: their check, and random ones."""

import torch
from torch import Tensor

from embodied.core.spec import ActionSpace, Box


def checked_chunk(action: Tensor, space: ActionSpace, num_envs: int) -> Tensor:
    """Return the chunk [N, E, A] of a chunk or of one action [N, A], clipped to the limits of a ``Box``.

    ValueError for a wrong shape, and for a value that is not finite or not a choice.
    """
    shape = tuple(action.shape)
    if action.ndim == 2:
        action = action.unsqueeze(1)
    if action.ndim != 3 or (action.shape[0], action.shape[2]) != (num_envs, space.size) or action.shape[1] < 1:
        needed = f"[{num_envs}, E, {space.size}] with E >= 1, or [{num_envs}, {space.size}]"
        raise ValueError(f"action: got shape {shape}, needed {needed}")
    if not isinstance(space, Box):
        counts = space.counts
        if action.is_floating_point() or action.dtype == torch.bool:
            raise ValueError(f"action: got {action.dtype}, needed integers, one of {counts[0]} choices")
        low_A, high_A = (bound.tolist() for bound in torch.aminmax(action.flatten(0, 1), dim=0))
        for entry, (least, most, count) in enumerate(zip(low_A, high_A, counts, strict=True)):
            if least < 0 or most >= count:
                where = f" in entry {entry}" if len(counts) > 1 else ""
                allowed = f"allowed: 0 to {count - 1}; nothing was executed"
                raise ValueError(f"action: got {least} to {most}{where}, {allowed}")
        return action
    if not bool(torch.isfinite(action).all()):
        rows = (~torch.isfinite(action).flatten(1).all(-1)).nonzero().squeeze(-1)
        raise ValueError(f"action: NaN or infinite in env {rows[:5].tolist()}; nothing was executed")
    return action.clamp(-1, 1)


def random_actions(space: ActionSpace, num_envs: int, num_actions: int, seed: int) -> Tensor:
    """Draw chunks from the action space, [N, E, A]; a function of the arguments."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_envs, num_actions)
    if isinstance(space, Box):
        return 2 * torch.rand((*shape, space.size), generator=generator) - 1
    return torch.stack([torch.randint(count, shape, generator=generator) for count in space.counts], -1)
