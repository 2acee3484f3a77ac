"""The parts of a run on Ray as its main thread sees them: the same attributes and methods, each one a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor, nn

from embodied.core.protocols import Metrics, Policy
from embodied.runtime.meter import joined
from embodied.runtime.ray.controller import LEARNER, Controller
from embodied.runtime.ray.messages import Delivery, Learned
from embodied.runtime.track import Track

Wait = Callable[[Any], Any]
"""reference -> its value; raises what ended the run meanwhile"""


class RemoteWorker:
    """An env worker; calls go to its present process. index: its own. num_groups: its env groups."""

    def __init__(self, controller: Controller, wait: Wait, index: int, num_groups: int) -> None:
        self.name, self.num_groups = controller.workers[index], num_groups
        self._controller, self._wait = controller, wait

    @property
    def resumes_exactly(self) -> bool:
        """Whether all its envs can be restored from a checkpoint."""
        built = self._controller.parts[self.name].built
        return built is not None and built.resumes_exactly

    def totals(self) -> dict[str, float]:
        """Return what its tracks have counted so far."""
        return dict(self._controller.totals(self.name))

    @property
    def incarnation(self) -> int:
        """How often the worker was replaced, in earlier sessions of the run too."""
        return self._controller.seed_incarnation(self.name)

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._controller.earlier[self.name] = incarnation

    def load_state_dict(self, group: int, state: Mapping[str, Any]) -> None:
        """Continue one group from its state."""
        self._wait(self._controller.parts[self.name].handle.load_state_dict.remote(group, state))


class RemoteLearner:
    """The learner, and the store of its weights. policy: a replica that is brought up to date when it is read."""

    def __init__(self, controller: Controller, wait: Wait, policy: Policy) -> None:
        self.iteration = 0
        self.env_steps = 0
        self.version = -1
        self.track = Track("training loop", "other")  # of the main thread
        self._totals: Mapping[str, float] = {}  # of the learner's own track
        self._controller, self._wait = controller, wait
        self._replica, self._replica_of = policy, 0

    @property
    def deployed(self) -> Policy:
        """The policy to evaluate and to keep."""
        if self._replica_of != self.iteration:
            self.update_replica(self.deployed_weights())
        return self._replica

    def deployed_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights to evaluate and to keep."""
        weights: dict[str, Tensor] = copy.deepcopy(self._wait(self._handle.deployed_weights.remote()))
        return weights

    def ask_weights(self) -> Future[dict[str, Tensor]]:
        """Ask for the weights to evaluate and to keep."""
        future: Future[dict[str, Tensor]] = self._handle.deployed_weights.remote().future()
        return future

    def update_replica(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights to keep into ``deployed``."""
        assert isinstance(self._replica, nn.Module)
        self._replica.load_state_dict(weights)
        self._replica_of = self.iteration

    def publish(self) -> None:
        """Publish the present weights."""
        self._take(self._wait(self._handle.publish.remote()))

    def learn(self, batch: Sequence[Delivery]) -> Metrics:
        """Update on one batch and publish; return the algorithm's metrics."""
        with self.track.during("learn"):
            learned: Learned = self._wait(self._handle.learn.remote([delivery.fragment for delivery in batch]))
        self._take(learned)
        return learned.metrics

    def totals(self) -> dict[str, float]:
        """Return what the learner's track has counted; waiting for fragments and ``other`` are of the main thread."""
        own = self.track.totals()
        own.pop("learn_s", None)
        return {**self._totals, **own}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with keys policy, algorithm and counters."""
        state: dict[str, Any] = copy.deepcopy(self._wait(self._handle.state_dict.remote()))
        self.update_replica(state["policy"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. UserError for a policy of another architecture."""
        own = {key: state[key] for key in ("policy", "algorithm", "counters")}
        self._wait(self._handle.load_state_dict.remote(own))
        self.iteration = state["counters"]["iteration"]
        self.env_steps = state["counters"]["env_steps"]
        self.update_replica(state["policy"])

    def _take(self, learned: Learned) -> None:
        self.iteration, self.env_steps, self._totals = learned.iteration, learned.env_steps, learned.totals
        self.version = learned.publication.version
        self._controller.publication = learned.publication

    @property
    def _handle(self) -> Any:
        return self._controller.parts[LEARNER].handle


class RemoteServers:
    """The actor servers together."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def totals(self) -> dict[str, float]:
        """Return what their tracks have counted so far: of seconds the mean over the servers, of counts the sum."""
        return joined([self._controller.totals(name) for name in self._controller.servers])
