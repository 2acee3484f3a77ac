"""The learner of a run on Ray as its main thread sees it: each method is a call of the learner's process."""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from embodied.core.algorithm import Metrics
from embodied.core.errors import one_line
from embodied.core.policy import Policy
from embodied.runtime.loop import LearnerLost, Recover
from embodied.runtime.ray.controller import LEARNER, Controller
from embodied.runtime.ray.hosts import Delivery
from embodied.runtime.ray.learner_host import Learned
from embodied.runtime.ray.wire import is_fault, value_of
from embodied.runtime.watch import Totals, Track


class RemoteLearner:
    """One incarnation of the learner, and the store of its weights. Once it is gone, every call raises LearnerLost.

    policy: a replica that is brought up to date when it is read. wait: returns the finished future of a reference.
    recover: of LearnerLost.
    """

    def __init__(
        self, controller: Controller, policy: Policy, wait: Callable[[Any], Future[Any]], recover: Recover
    ) -> None:
        self.track = Track("training loop", "other")  # of the main thread
        self._controller, self._replica, self._wait, self._recover = controller, policy, wait, recover
        self.begin(0)

    def begin(self, incarnation: int) -> None:
        """Call this incarnation from now on, which is at the beginning of the run."""
        self.incarnation, self.version = incarnation, -1
        self.iteration = self.env_steps = 0
        self._totals: Totals = {}  # of the learner's own track
        self._replica_of = 0 if incarnation == 0 else -1  # iteration of the replica's weights

    def check(self) -> Any:
        """Return the handle of its process. Raise LearnerLost if it is gone."""
        part = self._controller.parts.get(LEARNER)
        if part is None or part.incarnation != self.incarnation:
            raise LearnerLost(one_line(self._controller.supervision.cause(LEARNER)), self._recover)
        return part.handle

    @property
    def deployed(self) -> Policy:
        if self._replica_of != self.iteration:
            self.update_replica(self.deployed_weights())
        return self._replica

    def deployed_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = copy.deepcopy(self._ask("deployed_weights"))
        return weights

    def update_replica(self, weights: Mapping[str, Tensor]) -> None:
        self._replica.load_state_dict(weights)
        self._replica_of = self.iteration

    def publish(self) -> None:
        self._take(self._ask("publish"))

    def learn(self, batch: Sequence[Delivery]) -> Metrics:
        with self.track.during("learn"):
            learned: Learned = self._ask("learn", [delivery.fragment for delivery in batch])
        self._take(learned)
        self._controller.post(partial(self._controller.learned, self.incarnation, self.iteration))
        return learned.metrics

    def totals(self) -> Totals:
        """Return the totals of the learner's track; waiting for fragments and ``other`` are of the main thread."""
        own = self.track.totals()
        own.pop("learn_s", None)
        return {**self._totals, **own}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(self._ask("state_dict"))
        self.update_replica(state["policy"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        needed = ("policy", "algorithm", "counters", "generator")
        self._ask("load_state_dict", {key: state[key] for key in needed if key in state})
        self.iteration = state["counters"]["iteration"]
        self.env_steps = state["counters"]["env_steps"]
        self.update_replica(state["policy"])

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the host. LearnerLost if the process is gone or cannot get its data."""
        future = self._wait(getattr(self.check(), method).remote(*arguments))
        error = future.exception()
        if error is not None and is_fault(error):
            self._controller.post(partial(self._controller.fail, LEARNER, self.incarnation, error))
            raise LearnerLost(one_line(error), self._recover) from error
        return value_of(future)

    def _take(self, learned: Learned) -> None:
        self.iteration, self.env_steps, self._totals = learned.iteration, learned.env_steps, learned.totals
        self.version = learned.publication.version
        self._controller.publication = learned.publication
