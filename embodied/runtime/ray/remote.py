"""The parts of a run on Ray as its main thread sees them: the same attributes and methods, each one a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from embodied.core.algorithm import Metrics
from embodied.core.errors import one_line
from embodied.core.policy import Policy
from embodied.runtime.loop import LearnerLost
from embodied.runtime.ray.controller import LEARNER, Controller
from embodied.runtime.ray.messages import Delivery, Learned
from embodied.runtime.ray.wire import is_fault, value_of
from embodied.runtime.watch.meter import joined
from embodied.runtime.watch.track import Track

Wait = Callable[[Any], Future[Any]]
"""reference -> its future, which is done; raises what ended the run meanwhile"""
Recover = Callable[[Mapping[str, Any] | None], None]
"""``LearnerLost.recover``"""


class RemoteWorker:
    """An env worker; calls go to its present process. index: its own."""

    def __init__(self, controller: Controller, wait: Wait, index: int) -> None:
        self.name = controller.workers[index]
        self._controller, self._wait = controller, wait
        self._lacks_state = False

    @property
    def resumes_exactly(self) -> bool:
        """Whether all its envs can be restored from a checkpoint; of a worker that has not joined it is not known."""
        part = self._controller.parts.get(self.name)
        return part is None or part.built is None or part.built.resumes_exactly

    def totals(self) -> dict[str, float]:
        """Return what its tracks have counted so far."""
        return dict(self._controller.totals(self.name))

    @property
    def incarnation(self) -> int:
        """How often the worker was replaced, in earlier sessions of the run too."""
        return self._controller.seed_incarnation(self.name)

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._controller.prior_restarts[self.name] = incarnation
        if self._lacks_state:
            self._controller.post(partial(self._controller.renew, self.name))

    def load_state_dict(self, group: int, state: Mapping[str, Any] | None) -> None:
        """Continue one group from its state. Without one, or before the worker has joined, it gets new episodes."""
        if state is None or not self._controller.supervision.is_up(self.name):
            self._lacks_state = True
            return
        value_of(self._wait(self._controller.parts[self.name].handle.load_state_dict.remote(group, state)))


class RemoteLearner:
    """One incarnation of the learner, and the store of its weights. Once it is gone, every call raises LearnerLost.

    policy: a replica that is brought up to date when it is read. recover: of LearnerLost.
    """

    def __init__(
        self, controller: Controller, wait: Wait, policy: Policy, recover: Recover, incarnation: int = 0
    ) -> None:
        self.iteration = 0
        self.env_steps = 0
        self.version = -1
        self.incarnation = incarnation
        self.track = Track("training loop", "other")  # of the main thread
        self._totals: Mapping[str, float] = {}  # of the learner's own track
        self._controller, self._wait, self._recover = controller, wait, recover
        self._replica, self._replica_of = policy, 0 if incarnation == 0 else -1

    def successor(self, incarnation: int) -> RemoteLearner:
        """Return the learner that replaces this one, at the beginning of the run."""
        learner = RemoteLearner(self._controller, self._wait, self._replica, self._recover, incarnation)
        learner.track = self.track
        return learner

    def check(self) -> None:
        """Raise LearnerLost if it is gone."""
        _ = self._handle

    @property
    def deployed(self) -> Policy:
        """The policy to evaluate and to keep."""
        if self._replica_of != self.iteration:
            self.update_replica(self.deployed_weights())
        return self._replica

    def deployed_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights to evaluate and to keep."""
        weights: dict[str, Tensor] = copy.deepcopy(self._ask("deployed_weights"))
        return weights

    def ask_weights(self) -> Future[dict[str, Tensor]]:
        """Ask for the weights to evaluate and to keep."""
        future: Future[dict[str, Tensor]] = self._handle.deployed_weights.remote().future()
        return future

    def update_replica(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights to keep into ``deployed``."""
        self._replica.load_state_dict(weights)
        self._replica_of = self.iteration

    def publish(self) -> None:
        """Publish the present weights."""
        self._take(self._ask("publish"))

    def learn(self, batch: Sequence[Delivery]) -> Metrics:
        """Update on one batch and publish; return the algorithm's metrics."""
        with self.track.during("learn"):
            learned: Learned = self._ask("learn", [delivery.fragment for delivery in batch])
        self._take(learned)
        self._controller.post(partial(self._controller.learned, self.incarnation, self.iteration))
        return learned.metrics

    def totals(self) -> dict[str, float]:
        """Return what the learner's track has counted; waiting for fragments and ``other`` are of the main thread."""
        own = self.track.totals()
        own.pop("learn_s", None)
        return {**self._totals, **own}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with keys policy, algorithm and counters."""
        state: dict[str, Any] = copy.deepcopy(self._ask("state_dict"))
        self.update_replica(state["policy"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``. UserError for a policy of another architecture."""
        self._ask("load_state_dict", {key: state[key] for key in ("policy", "algorithm", "counters")})
        self.iteration = state["counters"]["iteration"]
        self.env_steps = state["counters"]["env_steps"]
        self.update_replica(state["policy"])

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the host. LearnerLost if the process is gone or cannot get its data."""
        future = self._wait(getattr(self._handle, method).remote(*arguments))
        error = future.exception()
        if error is not None and is_fault(error):
            self._controller.post(partial(self._controller.fail, LEARNER, self.incarnation, error))
            raise LearnerLost(one_line(error), self._recover) from error
        return value_of(future)

    def _take(self, learned: Learned) -> None:
        self.iteration, self.env_steps, self._totals = learned.iteration, learned.env_steps, learned.totals
        self.version = learned.publication.version
        self._controller.publication = learned.publication

    @property
    def _handle(self) -> Any:
        part = self._controller.parts.get(LEARNER)
        if part is None or part.incarnation != self.incarnation:
            raise LearnerLost(one_line(self._controller.supervision.cause(LEARNER)), self._recover)
        return part.handle


class RemoteServers:
    """The actor servers together."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def totals(self) -> dict[str, float]:
        """Return what their tracks have counted so far: of seconds the mean over the servers, of counts the sum."""
        return joined([self._controller.totals(name) for name in self._controller.servers])
