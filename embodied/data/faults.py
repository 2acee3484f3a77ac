"""Faults of demonstrations, and those that their numbers alone show."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied.core.spec import EnvSpec
from embodied.data.demonstrations import Demonstrations

UNEVEN = 0.05  # error of the time between two frames that rounding does not explain, control steps
LISTED = 5  # things in a message


class Fault(NamedTuple):
    """One fault. serious: imitation will probably fail because of it."""

    name: str
    serious: bool
    what: str
    where: str
    cure: str

    def __str__(self) -> str:
        return f"{'FAULT' if self.serious else 'doubt'} {self.name}: {self.what}; {self.where}. {self.cure}".strip()


def listed(things: Sequence[Any]) -> str:
    more = f" and {len(things) - LISTED} more" if len(things) > LISTED else ""
    return ", ".join(map(str, things[:LISTED])) + more


def check_frames(data: Demonstrations, time_F1: Tensor | None, spec: EnvSpec) -> list[Fault]:
    """Return faults of times (s), lengths and images, and entries that never vary."""
    episodes, lengths = data.episode_F.unique_consecutive(return_counts=True)
    limit, dt = spec.max_episode_steps, spec.control_dt_s
    time_F = torch.arange(len(data.episode_F)) * dt if time_F1 is None else time_F1[:, 0]
    uneven_F = ((time_F.double().diff() / dt - 1).abs() > UNEVEN) & (data.episode_F.diff() == 0)
    short, long, uneven = episodes[lengths == 1], episodes[lengths > limit], uneven_F.nonzero()[:, 0]
    found = list[Fault]()

    def check(name: str, serious: bool, at: list[Any], what: str, cure: str) -> None:
        if at:
            found.append(Fault(name, serious, f"{what}: {len(at)}", listed(at), cure))

    check("time stamps", True, uneven.tolist(), f"frames that are not {dt:g} s before the next", "Sample at that rate")
    check("one frame", False, short.tolist(), "episodes of one frame", "Check where episodes end")
    check("time limit", False, long.tolist(), f"episodes longer than the time limit of {limit} steps", "Cut them")
    names, values = (*spec.state_names, *spec.action_names), torch.cat((data.state_FS, data.action_FA), 1)
    still = [names[i] for i in (values == values[:1]).all(0).nonzero()[:, 0]]
    check("constant", False, still, "entries that never vary", "Check that they were recorded")
    for camera, images in data.images.items():
        flat = (images.flatten(1, 2) == images[:, :1, 0]).flatten(1).all(1).nonzero()[:, 0].tolist()
        frozen = [camera] if len(images) > 1 and bool((images == images[:1]).all()) else []
        check("images", True, flat, f"images of camera {camera} that are black or of one colour", "Check it")
        check("images", True, frozen, "cameras that show one image in all frames", "Check that they were running")
    return found
