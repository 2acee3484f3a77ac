"""The loop of a session, which is that of ``embodied/runtime/loop.py``, and the way on from a learner that was lost.

publish ──► [ batch complete ──► learn ──► consume ──► save, if due ] ──► …          (consume after save at 0)
    ▲                                             │ the learner was lost
    └── next learner: load the last checkpoint ◄──┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from embodied.runtime.channel import Channel
from embodied.runtime.ledger import Ledger
from embodied.runtime.ray.supervision import Supervision
from tests.runtime.protocol.parts import Components, Counting, Died, Publication, Sampled, Slot, Weight
from tests.runtime.protocol.world import Plan, Process, World

if TYPE_CHECKING:
    from tests.runtime.protocol.checks import Checks


class Loop(ABC):
    """What the main thread of a runtime does, when it need not wait."""

    world: World
    plan: Plan
    checks: Checks
    components: Components
    ledger: Ledger
    channel: Channel
    supervision: Supervision
    slots: list[Slot]
    processes: dict[str, Process]
    names: list[str]
    workers: list[str]
    prior_restarts: list[int]

    def begin(self, checkpoint: dict[str, Any] | None, policy: Weight) -> None:
        """Start from a checkpoint, if there is one."""
        self.saved = checkpoint  # the checkpoint that was finished last
        self.saving: dict[tuple[int, int], tuple[int, int]] | None = None
        self.publication: Publication | None = None
        self._doing = "waits for parts"
        self._lost = False
        self._best_iteration = 0
        self._begin_learner(policy)

    @abstractmethod
    def look(self) -> None:
        """Something changed: do what is possible now, and check."""

    @abstractmethod
    def dies(self, process: Process) -> None:
        """Let a process die."""

    @abstractmethod
    def worked(self, part: str, incarnation: int) -> None:
        """Count useful work."""

    def present(self) -> Publication | None:
        """Return the newest weights, if their learner is up."""
        newest = self.publication
        return newest if newest is not None and self.supervision.is_up("learner", newest.age[0]) else None

    def lose_learner(self) -> None:
        """The learner is gone. The main thread notices it when it needs the learner next."""
        self._lost = True
        if self._doing != "writes":
            self._doing, self.saving = "waits for the learner", None

    def advance(self) -> None:
        """Do what can be done now."""
        if self._doing == "waits for parts":
            up = set(filter(self.supervision.is_up, self.names))
            if up >= set(self.names) - set(self.workers) and len(up & set(self.workers)) >= self.plan.needed:
                self._ask_learner("publishes", self._publish)
        elif self._doing == "waits for the learner":
            if self.supervision.is_up("learner"):
                self._ask_learner("loads", self._load)
        elif self._doing == "collects":
            version = self.learner.iteration
            if self.checks.batch_is_due(version) and self.channel.has(version):
                batch: Any = self.channel.take(version, self.supervision.incarnation("learner"))
                self.checks.taken(version, batch)
                self._ask_learner("learns", self._learn, batch)
        elif self._doing == "saves" and self.saving is not None and self._all_saved(self.saving):
            self._write(self.saving)

    def _all_saved(self, saved: dict[tuple[int, int], tuple[int, int]]) -> bool:
        """Return whether all groups are saved. If not all workers are needed, those that are not up do not count."""
        lacking = {slot.name for slot in self.slots if (slot.worker, slot.group) not in saved}
        elastic = self.plan.needed < self.plan.workers
        return not lacking or (elastic and not any(map(self.supervision.is_up, lacking)))

    def _write(self, groups: dict[tuple[int, int], tuple[int, int]]) -> None:
        self._doing, self.saving = "writes", None
        incarnations = [
            prior + self.supervision.incarnation(name)
            for prior, name in zip(self.prior_restarts, self.workers, strict=True)
        ]
        state = {"groups": groups, "incarnations": incarnations, "learner": self.learner.state_dict()}
        state["ledger"] = {"version": self.learner.iteration}
        self.world.after(self.world.takes_s(0.2), self._on_written, self.checks.seen(state))

    # ---------------------------------------------------------------------------------------------------- learner
    def _begin_learner(self, policy: Weight) -> None:
        self.store = self.components.store()
        self.algorithm: Any = Counting(policy)
        self.learner: Any = self.components.learner(self.algorithm, self.store, mask_above=self.plan.mask_above)
        if self.saved is not None:
            self.learner.load_state_dict(self.saved["learner"])

    def _ask_learner(self, doing: str, call: Any, *arguments: Any) -> None:
        self._doing = doing
        self.world.send(self.processes["learner"], 0.2, call, *arguments)

    def _load(self, process: Process) -> None:
        self.world.after(self.world.takes_s(0.02), self._on_loaded, process)

    def _publish(self, process: Process) -> None:
        if process.wanted:  # another one has its place, and what this one does is seen by nobody
            self.learner.publish()
            self.world.after(self.world.takes_s(0.02), self._on_published, process)

    def _learn(self, process: Process, batch: list[Sampled]) -> None:
        if not process.wanted:
            return
        try:
            self.learner.learn(batch)
        except Died:
            self.dies(process)
        else:
            self.world.after(self.world.takes_s(0.02), self._on_learned, process, batch)

    # ---------------------------------------------------------------------------------------------------- answers
    def _on_loaded(self, process: Process) -> None:
        if not process.wanted:
            return
        self._lost = False
        self._begin_learner(Weight())
        self.ledger.continue_after(self.learner.iteration, process.incarnation)
        self.channel.empty(process.incarnation)
        self.checks.rewound(self.saved)
        self._ask_learner("publishes", self._publish)
        self.look()

    def _on_published(self, process: Process) -> None:
        if process.wanted:
            self._take(process)
            self._doing = "collects"
            self.look()

    def _on_learned(self, process: Process, batch: list[Sampled]) -> None:
        if not process.wanted:
            return
        self._take(process)
        self.checks.learned(batch)
        if self.learner.iteration > self._best_iteration:
            self._best_iteration = self.learner.iteration
            self.worked("learner", process.incarnation)
        due = self.learner.iteration % self.plan.save_every == 0
        if self.plan.max_staleness > 0 or not due:
            self.checks.consumed(self.ledger.consumed_batch())
        self._doing, self.saving = ("saves", {}) if due else ("collects", None)
        self.look()

    def _take(self, process: Process) -> None:
        self.publication = Publication(process, self.store.latest())
        self.checks.published(self.publication)

    def _on_written(self, state: dict[str, Any]) -> None:
        self.saved = state
        if self._lost:
            self._doing = "waits for the learner"
        else:
            if self.ledger.version < self.learner.iteration:
                self.checks.consumed(self.ledger.consumed_batch())
            self._doing = "collects"
        self.look()
