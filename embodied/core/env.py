"""Base class of all environments: all that the runtime, the commands and the views call on one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.episodes import EpisodePlans, EpisodeSampler, Ints
from embodied.core.spec import EnvSpec
from embodied.core.types import Obs, Timestep

Film = Callable[[int, int], Callable[[], NDArray[np.uint8]]]
"""(width, height) -> a function that renders the present state of every env, uint8 [N, height, width, 3]."""


class VecEnv(ABC):
    """N environments of one task, SAME_STEP autoreset. Used by one thread at a time.

    A subclass sets ``num_envs``, ``spec`` and ``device`` and implements ``reset``, ``step`` and, if it holds anything,
    ``close``. It draws plans from the sampler. All else is optional. Most simulators subclass ``EpisodicEnv``
    (envs/base/episodic.py) instead, which leaves them three methods.
    """

    num_envs: int
    """N, number of environments."""
    spec: EnvSpec
    """Description of the environment; the same for all N."""
    device: torch.device
    """Device of observations and rewards, and of the actions that ``step`` takes."""

    @cached_property
    def plans(self) -> EpisodePlans:
        """Plan of the present episode of each env, for instructions and random delays; a subclass may keep them here.

        Placeholders otherwise: the first instruction.
        """
        return EpisodePlans.empty(self.num_envs)

    @abstractmethod
    def reset(self, sampler: EpisodeSampler) -> Obs:
        """Start an episode in every env and return its observation, [N, ...].

        ``sampler`` gives the plans of these episodes, and those of the next ones whenever episodes end.
        """

    @abstractmethod
    def step(self, action: Tensor) -> Timestep:
        """Execute a chunk of actions, float32 [N, E, A] in [-1, 1], or int64 [N, E, A] for choices.

        ValueError for NaN or a wrong shape; nothing is executed then.
        """

    def close(self) -> None:  # noqa: B027 (many hold nothing)
        """Free what the environments hold, such as threads."""

    # -- episodes that begin later -------------------------------------------------------------------------------------

    autoreset: bool = True
    """Whether an env whose episode ended begins its next one in the same step. If not, it waits for ``begin``."""
    cut_after_success: int = 0
    """Control steps of success in a row after which an episode is truncated, of seven in eight env seeds; 0: of none.
    Set before ``reset``."""
    waiting_N: Tensor | None = None
    """Whether each env waits for ``begin``, bool [N]; it is not stepped then. None: the envs cannot wait."""

    def begin(self, ids: Ints, plans: EpisodePlans) -> None:
        """Start episodes with these plans in envs ``ids`` [n]; others go on. ValueError for plans beyond the spec."""
        raise NotImplementedError

    def observe(self, ids: Ints | None = None) -> Obs:
        """Return the present observation of envs ``ids`` (None: all), new tensors with one row per env."""
        raise NotImplementedError

    # -- exact resume --------------------------------------------------------------------------------------------------

    resumes_exactly: bool = False
    """Whether the envs can continue exactly from a saved state. Others start new episodes when a run is resumed."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that ``load_state_dict`` needs to continue exactly, as tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        """Continue from a state with a sampler whose state is loaded already. ValueError if it does not fit."""
        raise NotImplementedError

    # -- delays of inference -------------------------------------------------------------------------------------------

    max_delay: int = 0
    """D, greatest delay of inference in control steps. Above 0 the envs go on executing a chunk while the policy
    computes the next one: ``step`` takes all H planned actions, executes E control steps and keeps the later actions.
    Observations have ``prefix`` [N, D, A], the actions that the robot will execute meanwhile, and ``delay`` int64 [N],
    their number."""
    execute: int
    """E, control steps of a decision, of an environment with delays."""

    # -- rows that need not be stepped together ------------------------------------------------------------------------

    batch_size: int | None = None
    """Number of envs that ``receive`` waits for. None: all envs are stepped together, by ``step``."""

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Begin chunks [n, E, A] of envs ``ids``, int64 [n], none of which is under way. ValueError as in ``step``."""
        raise NotImplementedError

    def receive(self) -> tuple[Tensor, Timestep]:
        """Wait until ``batch_size`` of the envs under way are done, or all if there are fewer.

        Return their ids, int64 [n] ascending, and the result of their chunks with n rows in that order. ``final_ids``
        are indices of these rows; ``episodes`` have the ids of envs.
        """
        raise NotImplementedError

    # -- for people ----------------------------------------------------------------------------------------------------

    on_control_step: Callable[[Any], None] | None = None
    """Called with the env itself after every control step, before a reset. Environments with ``film`` call it."""
    film: Film | None = None
    """Method that prepares to render the envs for people; None: they cannot be rendered."""
    film_quickly: Film | None = None
    """As ``film``, with a second, much faster renderer, whose images look simpler; None: there is none."""

    @property
    def instruction_texts(self) -> Sequence[str]:
        """Text of the instruction of every env's present episode; empty where the environment has none."""
        if not self.spec.instructions:
            return [""] * self.num_envs
        return [self.spec.instructions[i].text for i in self.plans.instruction_n.tolist()]

    # -- demonstrations ------------------------------------------------------------------------------------------------

    expert: Callable[[], Tensor] | None = None
    """Method of a scripted expert: its action in the present state, [N, A]; None: there is no expert."""
