"""The parts as actors of Ray, on one machine or many.

    main thread              controller's thread             processes of Ray
    channel.take(v)  ◄─────  Ledger, Channel, Supervision ◄──► env workers ◄──► actor servers (pull weights)
    learner.learn    ──────────────────────────────────────► learner (gets fragments by reference, puts weights)
    evaluator's thread: weights to deploy, when due

With max_staleness=0 the parameters are those of ``sync``, bit for bit. What happens when a part dies or hangs:
``embodied/runtime/ray/supervision.py``. Ray is imported when a runtime is built, not with this module.
"""

from __future__ import annotations

import concurrent.futures
import copy
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from embodied.core.algorithm import Metrics
from embodied.core.errors import UserError
from embodied.runtime.channel import Snapshot
from embodied.runtime.loop import LearnerLost, Runtime
from embodied.runtime.ray.cluster import Cluster
from embodied.runtime.ray.config import RayConfig
from embodied.runtime.recipe import Recipe
from embodied.runtime.threads import Doing
from embodied.runtime.watch import Totals, Track, joined

if TYPE_CHECKING:
    from embodied.runtime.ray.hosts import Delivery
    from embodied.runtime.ray.remote import RemoteLearner

CHECK_S = 0.2
"""Seconds between two looks for a failure while the main thread waits."""
CLOSE_S = 10.0
"""Seconds that parts have to hand over the last weights and to close their envs."""
BEGINNING: dict[str, Any] = {"counters": {"iteration": 0, "env_steps": 0}, "rollout": {}, "evaluated_at": 0}
"""State of a runtime whose learner begins anew."""


class RayRuntime(Runtime):
    """Parts in processes of Ray, which are up when it is built. Between iterations they go on sampling."""

    learner: RemoteLearner

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        config = RayConfig.of(recipe.config)
        check_learners(config, recipe)
        with closing(recipe.make_env(1, 1)) as env:  # bad options of an environment are reported from here
            self.spec = env.spec
        with ExitStack() as opened:
            cluster = opened.enter_context(closing(Cluster(config.address)))
            from embodied.runtime.ray.controller import Controller  # imports Ray, which ``cluster`` has prepared
            from embodied.runtime.ray.creation import Creator
            from embodied.runtime.ray.remote import RemoteLearner

            creator = Creator(cluster, recipe, self.spec)
            self.controller = Controller(self, config, creator)
            self.learner = RemoteLearner(self.controller, creator.policy, self._wait, self._recover)
            self.budget, evaluated = creator.budget, copy.deepcopy(creator.policy)
            self.evaluator = recipe.evaluator(evaluated, self.spec, self.budget, self.threads)
            opened.callback(self.evaluator.close)
            opened.callback(self.controller.end_parts, CLOSE_S)
            opened.callback(self._take_last_spans)
            opened.callback(self.threads.join)
            opened.callback(self._keep_weights)
            self.threads.spawn("controller", self.controller.run)
            self._wait_for(self.controller.ready)
            self.opened = opened.pop_all()

    def learn(self, batch: Sequence[Delivery]) -> Metrics:
        restarts, workers = self.controller.supervision.restarts, self.controller.num_up
        return {**self.learner.learn(batch), "async/restarts": float(restarts), "async/env_workers": float(workers)}

    def _start(self) -> None:
        super()._start()
        self.controller.post()

    def _check(self) -> None:
        super()._check()
        self.learner.check()

    def _consume(self) -> None:
        super()._consume()
        self.controller.post()

    def _totals(self) -> dict[str, Totals]:
        totals = self.controller.totals
        return {
            "env_worker": joined([totals(name) for name in self.controller.workers]),
            "actor_server": joined([totals(name) for name in self.controller.servers]),
            "learner": self.learner.totals(),
        }

    def _tracks(self) -> dict[str, list[Track]]:
        """Return the tracks of this process; those of the parts come with their signs of life."""
        return {"controller": [self.controller.track, self.learner.track], "evaluator": [self.evaluator.track]}

    def _doing(self) -> Doing:
        here = (self.learner.track, self.evaluator.track)
        return {**self.controller.doing, **{track.name: track.present for track in here}}

    @property
    def layout_note(self) -> str:
        controller, learners = self.controller, self.controller.config.num_learners
        workers, servers = len(controller.workers), len(controller.servers)
        return f"processes: env workers {workers}, actor servers {servers}, learner {learners}"

    @property
    def incarnations(self) -> list[int]:
        prior, supervision = self.controller.prior_restarts, self.controller.supervision
        return [prior[name] + supervision.incarnation(name) for name in self.controller.workers]

    @property
    def resumes_exactly(self) -> bool:
        parts = [self.controller.parts.get(name) for name in self.controller.workers]
        return all(part is None or part.built is None or part.built.resumes_exactly for part in parts)

    def _group_states(self) -> list[dict[str, Any] | None]:
        """Wait until each group was saved between two fragments; None: its worker is not there."""
        self.controller.snapshot = snapshot = Snapshot(self.groups)
        self.controller.post()
        try:
            while not snapshot.complete.wait(CHECK_S):
                self.threads.check_running()
                self.learner.check()  # without it the fragments under way do not end
        finally:
            self.controller.snapshot = Snapshot()
        return [copy.deepcopy(snapshot.states[key]) for key in self.groups]

    def _load_groups(self, states: Sequence[Mapping[str, Any] | None], incarnations: Sequence[int]) -> None:
        """Continue from states. A worker without one, or that has not joined, gets new episodes."""
        from embodied.runtime.ray.wire import value_of

        controller, lacking = self.controller, set()
        for (worker, group), state in zip(self.groups, states, strict=True):
            name = controller.workers[worker]
            if state is None or not controller.supervision.is_up(name):
                lacking.add(name)
            else:
                value_of(self._wait(controller.parts[name].handle.load_state_dict.remote(group, state)))
        for name, incarnation in zip(controller.workers, incarnations, strict=False):
            controller.prior_restarts[name] = incarnation
        for name in sorted(lacking):
            controller.post(partial(controller.renew, name))

    def _recover(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the learner that replaces the lost one. Workers go on from where they are now."""
        supervision, learner = self.controller.supervision, self.learner
        while supervision.incarnation("learner") == learner.incarnation or not supervision.is_up("learner"):
            self.threads.check_running()
            time.sleep(CHECK_S)
        learner.begin(supervision.incarnation("learner"))
        runtime = BEGINNING if state is None else state["runtime"]
        if state is not None:
            learner.load_state_dict({**state, **runtime})
        done = threading.Event()

        def rewind() -> None:  # in the controller's thread, between two events
            self.ledger.continue_after(learner.iteration, learner.incarnation)
            self.channel.empty(learner.incarnation)
            done.set()

        self.controller.post(rewind)
        self._wait_for(done)
        self._rollout = dict(runtime["rollout"])
        self.evaluator.forget(runtime["evaluated_at"])

    def _wait_for(self, event: threading.Event) -> None:
        """Wait for an event. Raise what ended the run meanwhile."""
        while not event.wait(CHECK_S):
            self.threads.check_running()

    def _wait(self, reference: Any) -> concurrent.futures.Future[Any]:
        """Return the future of a reference when it is done. Raise what ended the run meanwhile."""
        future: concurrent.futures.Future[Any] = reference.future()
        while not concurrent.futures.wait([future], CHECK_S).done:
            self.threads.check_running()
        return future

    def _keep_weights(self) -> None:
        """Bring ``policy`` up to date for those who read it after the end, unless the learner is in an update."""
        if self.learner.version >= 0 and not self.threads.stopping.is_set():
            with suppress(LearnerLost):
                weights = self.learner.check().deployed_weights.remote().future()
                if concurrent.futures.wait([weights], CLOSE_S).done and weights.exception() is None:
                    self.learner.update_replica(weights.result())

    def _take_last_spans(self) -> None:
        """Take the spans since the last signs of life, of the parts that still answer."""
        if self.trace is None:
            return
        parts = self.controller.parts.items()
        pulses = {name: part.handle.pulse.remote(False).future() for name, part in parts if part.built}
        concurrent.futures.wait(pulses.values(), CLOSE_S)
        for name, pulse in pulses.items():
            if pulse.done() and pulse.exception() is None:
                self.trace.add(name, pulse.result().spans)

    def _end_waits(self) -> None:
        super()._end_waits()
        self.controller.stop()


def check_learners(config: RayConfig, recipe: Recipe) -> None:
    """Raise UserError if a batch cannot be shared by so many learner processes."""
    num, groups = config.num_learners, len(recipe.groups)
    key = f"runtime.num_learners={num}"
    if num > groups:
        cure = "More groups: num_env_workers, groups_per_worker"
        raise UserError(f"{key}: a batch has {groups} fragments, one of each env group, allowed: 1 to {groups}. {cure}")
    share = config.resources_of("learner", recipe.device.type == "cuda").get("GPU", 0.0)
    if num > 1 and recipe.device.type == "cuda" and share <= 0.5:
        raise UserError(f"{key}: each needs a GPU of its own, got runtime.learner.resources.GPU={share:g}, allowed: 1")
