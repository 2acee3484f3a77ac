"""What the runtime asks of an environment, a policy and an algorithm. Nothing else is called on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.core.episodes import EpisodeSampler
from embodied.core.spec import EnvSpec
from embodied.core.types import Evaluation, Fragment, Obs, PolicySample, Timestep

Metrics = dict[str, float]


@runtime_checkable
class VecEnv(Protocol):
    """N environments of one task, SAME_STEP autoreset. Used by one thread at a time."""

    num_envs: int
    spec: EnvSpec
    device: torch.device
    """Where observations and rewards are, and where actions should be."""

    def reset(self, sampler: EpisodeSampler) -> Obs:
        """Start an episode in every env as ``sampler`` says, which is asked again whenever one ends.

        Returns the observation of every env, with leading dimension N.
        """
        ...

    def step(self, action: Tensor) -> Timestep:
        """Execute a chunk of actions, float32 [N, E, A] in [-1, 1], or int64 [N, E, 1] for ``Discrete``.

        ValueError for NaN or a wrong shape; nothing is executed then.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class ExactResume(VecEnv, Protocol):
    """A VecEnv that can go on exactly from a saved state. A run without it starts new episodes when it is resumed."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that ``load_state_dict`` needs to continue exactly, as tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor], sampler: EpisodeSampler) -> None:
        """Continue from a state; ``sampler`` has loaded its own already. ValueError for one that does not fit."""
        ...


@runtime_checkable
class Watchable(VecEnv, Protocol):
    """A VecEnv that calls ``on_control_step`` with itself after every control step, before a reset."""

    on_control_step: Callable[[Any], None] | None


@runtime_checkable
class Demonstrating(VecEnv, Protocol):
    """A VecEnv with a scripted expert."""

    def expert(self) -> Tensor:
        """The action [N, A] that leads from the present state to success."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A torch module that acts, and that can tell the likelihood of how it acted."""

    horizon: int
    """H, planned actions of a chunk."""
    execute: int
    """E, executed actions of a chunk."""

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the standard normals that ``act`` needs for one decision."""
        ...

    @property
    def plan_noise_shape(self) -> tuple[int, ...]:
        """Shape of the standard normals that ``plan`` can take for one decision."""
        ...

    def plan(self, obs: Obs, noise: Tensor | None = None) -> Tensor:
        """Plan a chunk [N, H, A] for each row of obs: what is deployed. No gradient.

        It needs nothing privileged and runs no critic. noise: standard normals [N, *plan_noise_shape]; None plans
        deterministically.
        """
        ...

    def act(self, obs: Obs, noise: Tensor) -> PolicySample:
        """Draw a chunk for each row of obs with noise [N, *noise_shape], to explore. No gradient."""
        ...

    def evaluate(self, obs: Obs, chain: Tensor) -> Evaluation:
        """Log-probability, entropy and value of the decisions recorded in chain, differentiable."""
        ...

    def value(self, obs: Obs) -> Tensor:
        """Critic's value of each row of obs, [N]."""
        ...

    def update_normalizer(self, obs: Obs) -> None:
        """Fold a batch of observations [B, ...] into the running statistics (buffers of the module)."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


@runtime_checkable
class Instructable(Protocol):
    """A policy that reads instructions, also such as are not in the spec that it was built for."""

    def tokenize(self, texts: Sequence[str]) -> Obs:
        """``instruction_tokens`` and ``instruction_mask`` [N, L] of N texts, in place of ``instruction``.

        UserError for a text that the policy cannot read.
        """
        ...


@runtime_checkable
class Startable(Protocol):
    """A policy that a run can start from (init=)."""

    must_match: tuple[str, ...]
    """Options that change what the weights mean without changing their shapes; both runs need the same values."""
    optional_suffixes: tuple[str, ...]
    """Suffixes of weights that the run named by ``init=`` may lack; the new run then keeps its own."""


@runtime_checkable
class Fitted(Protocol):
    """A policy whose normaliser can be fitted to a data set."""

    def fit_normalizer(self, obs: Obs) -> None:
        """Fit the statistics of the keys present and freeze them: ``state`` [F, S] and the policy's learning targets.

        Learning targets that already have statistics keep them.
        """
        ...


@runtime_checkable
class Imitator(Fitted, Protocol):
    """A policy that can learn from demonstrated chunks."""

    not_imitated: tuple[str, ...]
    """Prefixes of the weights that imitation does not train: those of exploration and critic."""

    def imitation_loss(self, obs: Obs, action_NHA: Tensor, generator: torch.Generator) -> Tensor:
        """Loss of demonstrated chunks [N, H, A], a differentiable scalar."""
        ...


@runtime_checkable
class Precomputing(Protocol):
    """A policy of whose network a part is frozen."""

    precompute_in_actor: bool
    """Whether it is done where decisions are made, once each, so that the learner never sees what was read; otherwise
    the learner does it, once for every batch."""

    def precompute(self, obs: Obs) -> Obs:
        """Observations [B, ...] in which what the frozen part makes of them takes the place of what it reads; as they
        are where nothing is frozen. ``evaluate`` takes either."""
        ...

    def may_keep(self, decisions: int) -> bool:
        """Whether what so many observations become is small enough to be kept."""
        ...


@runtime_checkable
class Pretrained(Protocol):
    """A policy around a model of another library, whose layout on disk it can write."""

    def save_architecture(self, path: Path) -> None:
        """What the policy's own weights need beside them to be loaded again, into a new directory."""
        ...

    def save_pretrained(self, path: Path) -> None:
        """All that the other library needs to load the model, beside what ``save_architecture`` wrote."""
        ...


@runtime_checkable
class Wrapper(Protocol):
    """A policy around another one whose weights it needs and never changes."""

    wraps: str  # prefix of that policy's weights among its own


@runtime_checkable
class Algorithm(Protocol):
    """Turns fragments into better weights. Owns the policy's optimiser.

    policy: being trained; its weights are what actors get. deployed: what is evaluated and kept, the policy itself or
    an average of its weights.
    """

    policy: Policy
    deployed: Policy

    def update(self, fragments: Sequence[Fragment], version: int) -> Metrics:
        """One PPO-style update on a batch; ``version`` counts the batches consumed before this one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, schedules, random generators, and the policy's weights unless it is ``deployed``: tensors and
        plain numbers only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
