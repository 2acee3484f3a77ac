"""Broken variants of the parts under test, each with a mistake that somebody could make. All are found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from embodied.runtime.channel import Channel, Weights, WeightStore
from embodied.runtime.learner import Learner
from embodied.runtime.ledger import Ledger, Ticket
from embodied.runtime.ray.supervision import Decision, Phase, Supervision
from tests.runtime.protocol.parts import Components


class LosesCreditOfTheDead(Ledger):
    def release_worker(self, worker: int, incarnation: int) -> int:
        return 0


class LosesNumberOfTheDead(Ledger):
    def release_worker(self, worker: int, incarnation: int) -> int:
        released = super().release_worker(worker, incarnation)
        self._freed.clear()
        return released


class KeepsPlaceOfTheDead(Ledger):
    """With max_staleness=0 the group of a dead worker may not sample for the batch again."""

    def release_worker(self, worker: int, incarnation: int) -> int:
        given = self._given.copy()
        released = super().release_worker(worker, incarnation)
        self._given = given
        return released


class CountsDuplicates(Ledger):
    def deliver(self, ticket: Ticket) -> bool:
        return super().deliver(ticket) or self._leases.get(ticket.sequence) is None


class AcceptsOldIncarnations(Ledger):
    def deliver(self, ticket: Ticket) -> bool:
        return super().deliver(self._leases.get(ticket.sequence, ticket))


class AdmitsOneMore(Ledger):
    def try_acquire(self, worker: int, incarnation: int = 0, group: int = 0) -> Ticket | None:
        self.batch_fragments += 1
        ticket = super().try_acquire(worker, incarnation, group)
        self.batch_fragments -= 1
        return ticket


class GivesNumbersAnew(Ledger):
    """The number of a released ticket is not the next one's."""

    def release_worker(self, worker: int, incarnation: int) -> int:
        released = super().release_worker(worker, incarnation)
        self._freed[:] = range(self._next, self._next + len(self._freed))
        self._next += len(self._freed)
        return released


class LetsFastGroupsIn(Ledger):
    def try_acquire(self, worker: int, incarnation: int = 0, group: int = 0) -> Ticket | None:
        self._given.clear()
        return super().try_acquire(worker, incarnation, group)


class ForgetsItsVersion(Ledger):
    def continue_after(self, version: int, learner: int) -> None:
        if learner:
            super().continue_after(version, learner)


class CountsTheBatchTwice(Ledger):
    def continue_after(self, version: int, learner: int) -> None:
        super().continue_after(version if learner else version + 1, learner)


class ForgetsToGoBack(Ledger):
    """A learner was lost, and its batches count on."""

    def continue_after(self, version: int, learner: int) -> None:
        super().continue_after(max(version, self.version), learner)


class KeepsTicketsOfALostLearner(Ledger):
    def continue_after(self, version: int, learner: int) -> None:
        leases = dict(self._leases)
        super().continue_after(version, learner)
        self._leases.update(leases)


class TakesTicketsOfALostLearner(Ledger):
    """Tickets do not say for which learner they are, so a late one is taken for another one with its number."""

    def continue_after(self, version: int, learner: int) -> None:
        super().continue_after(version, learner)
        self._learner = 0


class KeepsBatchesOfALostLearner(Channel):
    def empty(self, learner: int) -> None:
        self._learner = learner


class TakesInOrderOfArrival(Channel):
    def take(self, version: int, learner: int = 0) -> list[Any]:
        return [self._fragments.pop(n) for n in list(self._fragments)[: self.batch_fragments]]


class IgnoresTheOrder(Channel):
    """With order=arrival, batches are held up by their slowest ticket."""

    def has(self, version: int) -> bool:
        size = self.batch_fragments
        return all(number in self._fragments for number in range(version * size, (version + 1) * size))


class TakesTheNewest(Channel):
    """With order=arrival, a fragment may wait for ever."""

    def _numbers(self, version: int) -> Sequence[int]:
        numbers = super()._numbers(version)
        return sorted(self._fragments)[-self.batch_fragments :] if self.order == "arrival" else numbers


class LosesAFragment(Channel):
    def take(self, version: int, learner: int = 0) -> list[Any]:
        batch = super().take(version, learner)
        if len(self._fragments) > 1:
            self._fragments.popitem()
        return batch


class GoesBackward(WeightStore):
    """Every third time, a reader gets weights that it had before."""

    reads = 0
    old: Weights | None = None

    def latest(self) -> Weights:
        self.reads += 1
        newest = super().latest()
        self.old = self.old or newest
        return self.old if self.reads % 3 == 0 else newest


class PublishesLate(WeightStore):
    """A version is seen only with the next one."""

    waiting: tuple[int, dict[str, Tensor]] | None = None

    def publish(self, version: int, state: Mapping[str, Tensor], frozen: Collection[str] = ()) -> None:
        late, self.waiting = self.waiting, (version, {name: tensor.clone() for name, tensor in state.items()})
        super().publish(*(late or self.waiting))


class SharesTheLearnersTensors(WeightStore):
    def publish(self, version: int, state: Mapping[str, Tensor], frozen: Collection[str] = ()) -> None:
        self._newest = Weights(version, dict(state), dict.fromkeys(state, version))


class ForgetsSteps(Learner):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.env_steps = 0


class ForgetsIteration(Learner):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.iteration = 0


class ForgetsTheOptimiser(Learner):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps = self.algorithm.state_dict()
        super().load_state_dict({**state, "algorithm": steps})


class ForgetsWeights(Learner):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({**state, "policy": self.deployed_weights()})


class MasksNothing(Learner):
    """Learns from decisions of any age."""

    def __init__(self, *args: Any, mask_above: int | None) -> None:
        super().__init__(*args)


class MasksLate(Learner):
    def __init__(self, *args: Any, mask_above: int | None) -> None:
        super().__init__(*args, mask_above=None if mask_above is None else mask_above + 1)


class MasksTooMuch(Learner):
    def __init__(self, *args: Any, mask_above: int | None) -> None:
        super().__init__(*args, mask_above=None if mask_above is None else mask_above - 1)


class HearsTheDead(Supervision):
    """A failure of any incarnation counts as one of the present."""

    def failed(self, part: str, incarnation: int, *args: Any, **kwargs: Any) -> list[Decision]:
        return super().failed(part, self.incarnation(part), *args, **kwargs)


class StartsOnce(Supervision):
    """A part that fails a second time is not started again."""

    def _overdue(self, part: Any, now_s: float) -> list[Decision]:
        if part.phase is Phase.WAITING and part.incarnation > 1:
            part.due_s = now_s + 1.0
            return []
        return super()._overdue(part, now_s)


class NeverAsks(Supervision):
    def _overdue(self, part: Any, now_s: float) -> list[Decision]:
        if part.phase is Phase.UP:
            part.due_s = now_s + 1.0
            return []
        return super()._overdue(part, now_s)


class IgnoresLongOperations(Supervision):
    def answered(self, part: str, incarnation: int, now_s: float, busy_s: float = 0.0) -> list[Decision]:
        return super().answered(part, incarnation, now_s)


class EndsTooEarly(Supervision):
    """Failures count although useful work was done in between."""

    def worked(self, part: str, incarnation: int) -> list[Decision]:
        return []


class CuresForEver(Supervision):
    """Failures with useful work in between are never too many."""

    def failed(self, part: str, *args: Any, **kwargs: Any) -> list[Decision]:
        self._parts[part].recent.clear()
        return super().failed(part, *args, **kwargs)


class NeverCuresTheLearner(Supervision):
    def failed(self, part: str, incarnation: int, now_s: float, cause: BaseException, curable: bool = True) -> Any:
        return super().failed(part, incarnation, now_s, cause, curable and part != "learner")


SOUND = Components()
MUTANTS = {
    mutant.__name__: replace(SOUND, **{kind: mutant})
    for kind, mutants in {
        "ledger": (
            LosesCreditOfTheDead, LosesNumberOfTheDead, KeepsPlaceOfTheDead, CountsDuplicates,
            AcceptsOldIncarnations, AdmitsOneMore, GivesNumbersAnew, LetsFastGroupsIn, ForgetsItsVersion,
            CountsTheBatchTwice, ForgetsToGoBack, KeepsTicketsOfALostLearner, TakesTicketsOfALostLearner,
        ),
        "channel": (
            TakesInOrderOfArrival, LosesAFragment, IgnoresTheOrder, TakesTheNewest, KeepsBatchesOfALostLearner,
        ),
        "store": (GoesBackward, PublishesLate, SharesTheLearnersTensors),
        "learner": (
            ForgetsSteps, ForgetsIteration, ForgetsTheOptimiser, ForgetsWeights, MasksNothing, MasksLate, MasksTooMuch,
        ),
        "supervision": (
            HearsTheDead, StartsOnce, NeverAsks, IgnoresLongOperations, EndsTooEarly, CuresForEver,
            NeverCuresTheLearner,
        ),
    }.items()
    for mutant in mutants
}  # fmt: skip
