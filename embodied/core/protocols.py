"""Interfaces of environments, policies and algorithms: all that the runtime and the trainers call on them.

``VecEnv``, ``Policy`` and ``Algorithm`` are needed to train. The other protocols are capabilities, each optional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.episodes import EpisodeSampler
from embodied.core.policy import Policy as Policy
from embodied.core.process_group import ProcessGroup
from embodied.core.spec import EnvSpec
from embodied.core.types import Fragment, Obs, Timestep

Metrics = dict[str, float]
"""Values of one update by the name under which they are logged."""


# -- environments ------------------------------------------------------------------------------------------------------
@runtime_checkable
class VecEnv(Protocol):
    """N environments of one task, SAME_STEP autoreset. Used by one thread at a time."""

    num_envs: int
    """N, number of environments."""
    spec: EnvSpec
    """Description of the environment; the same for all N."""
    device: torch.device
    """Device of observations and rewards, and of the actions that ``step`` takes."""

    def reset(self, sampler: EpisodeSampler) -> Obs:
        """Start an episode in every env and return its observation, [N, ...].

        ``sampler`` gives the plans of these episodes, and those of the next ones whenever episodes end.
        """
        ...

    def step(self, action: Tensor) -> Timestep:
        """Execute a chunk of actions, float32 [N, E, A] in [-1, 1], or int64 [N, E, A] for choices.

        ValueError for NaN or a wrong shape; nothing is executed then.
        """
        ...

    def close(self) -> None:
        """Free what the environments hold, such as threads."""
        ...


@runtime_checkable
class ExactResume(VecEnv, Protocol):
    """A VecEnv that can continue exactly from a saved state. Other envs start new episodes when a run is resumed."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that ``load_state_dict`` needs to continue exactly, as tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        """Continue from a state with a sampler whose state is loaded already. ValueError if it does not fit."""
        ...


@runtime_checkable
class Delayed(VecEnv, Protocol):
    """A VecEnv that goes on executing a chunk while the policy computes the next one.

    ``step`` takes all H planned actions, executes E control steps and keeps the later actions. Observations have
    ``prefix`` [N, D, A], the actions that the robot will execute meanwhile, and ``delay`` int64 [N], their number.
    """

    execute: int
    """E, control steps of a decision."""
    max_delay: int
    """D, greatest delay of inference in control steps."""


@runtime_checkable
class RowByRow(VecEnv, Protocol):
    """A VecEnv whose envs need not be stepped together: some get actions while others are in the middle of a chunk."""

    batch_size: int
    """Number of envs that ``receive`` waits for."""

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Begin chunks [n, E, A] of envs ``ids``, int64 [n], none of which is under way. ValueError as in ``step``."""
        ...

    def receive(self) -> tuple[Tensor, Timestep]:
        """Wait until ``batch_size`` of the envs under way are done, or all if there are fewer.

        Return their ids, int64 [n] ascending, and the result of their chunks with n rows in that order. ``final_ids``
        are indices of these rows; ``episodes`` have the ids of envs.
        """
        ...


@runtime_checkable
class Watchable(VecEnv, Protocol):
    """A VecEnv with a callback for every control step."""

    on_control_step: Callable[[Any], None] | None
    """Called with the env itself after every control step, before a reset; None: nothing is called."""


@runtime_checkable
class Filmed(Watchable, Protocol):
    """A VecEnv that can be rendered for people."""

    @property
    def instruction_texts(self) -> Sequence[str]:
        """The instruction of every env's present episode, in words, N of them."""
        ...

    def film(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return a function that renders the present state of every env, uint8 [N, height, width, 3]."""
        ...


@runtime_checkable
class FilmedQuickly(Filmed, Protocol):
    """A VecEnv with a second, much faster renderer, whose images look simpler."""

    def film_quickly(self, width: int, height: int) -> Callable[[], NDArray[np.uint8]]:
        """Return what ``film`` returns, with the faster renderer."""
        ...


@runtime_checkable
class Demonstrating(VecEnv, Protocol):
    """A VecEnv with a scripted expert."""

    def expert(self) -> Tensor:
        """Return the expert's action in the present state, [N, A]."""
        ...


# -- algorithms --------------------------------------------------------------------------------------------------------
@runtime_checkable
class Algorithm(Protocol):
    """Reinforcement learning on fragments. Owns the policy's optimiser."""

    policy: Policy
    """Policy being trained; the actors get its weights."""
    deployed: Policy
    """Policy that is evaluated and kept: ``policy`` itself or an average of its weights over updates."""

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        """Train on one batch; ``version`` counts the batches consumed before it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain numbers: optimiser, schedules, random generators.

        The weights of ``policy`` are in it unless ``policy`` is ``deployed``.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from what ``state_dict`` returned."""
        ...


@runtime_checkable
class SharedUpdate(Protocol):
    """An algorithm whose updates several learner processes can make together."""

    learners: ProcessGroup
    """The processes; ``SINGLE_PROCESS`` until the runtime sets it. Each then calls ``update`` with its own fragments of
    the batch, at least one. All must end with the same weights and metrics, bit for bit."""
