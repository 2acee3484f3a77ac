"""Several learner processes in the place of one: they begin, answer, learn and end together.

    controller ── learn(fragments) ──► LearnerGroup ──► learn(every n-th) of process 0, assist(the others) of the rest
                                            └── one answer when all have answered, or the first error

To the controller they are one part. One that dies, hangs or takes too long is a failure of the part, so all of them are
killed and replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray

from embodied.runtime.ray.messages import Assisted, Learned, Pulse
from embodied.runtime.watch.meter import joined


class Calls:
    """Calls of several processes, which have one answer. join: makes it from the answers of all, in their order."""

    def __init__(self, references: Sequence[Any], join: Callable[[list[Any]], Any]) -> None:
        self._references, self._join = references, join

    def future(self) -> Future[Any]:
        """Return the future of the joined answer, or of the first error, for which no other answer is awaited."""
        futures: list[Future[Any]] = [reference.future() for reference in self._references]
        answer: Future[Any] = Future()
        lock = threading.Lock()

        def look(_: Future[Any]) -> None:
            with lock:
                if answer.done():
                    return
                done = [future for future in futures if future.done()]
                errors = [error for future in done if (error := future.exception()) is not None]
                if errors:
                    answer.set_exception(errors[0])
                elif len(done) == len(futures):
                    answer.set_result(self._join([future.result() for future in futures]))

        for future in futures:
            future.add_done_callback(look)
        return answer


class Method:
    """A method of the group, called as one of an actor of Ray: ``group.learn.remote(...)``."""

    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class LearnerGroup:
    """Handle of learner processes, with the methods of ``LearnerHost``. members: their handles, by rank."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)
        first = self.members[0]
        self.publish, self.state_dict, self.deployed_weights = first.publish, first.state_dict, first.deployed_weights
        self.build, self.pulse, self.learn = Method(self._build), Method(self._pulse), Method(self._learn)
        self.load_state_dict, self.set_others_idle = Method(self._load_state_dict), Method(self._set_others_idle)

    def _build(self) -> Calls:
        rendezvous = self.members[0].open_store.remote()
        return Calls([member.build.remote(rendezvous) for member in self.members], first_of)

    def _pulse(self, tracing: bool) -> Calls:
        return Calls([member.pulse.remote(tracing) for member in self.members], join_pulses)

    def _learn(self, fragments: Sequence[Any]) -> Calls:
        """Give every process every n-th fragment, so that those of a node that is lost are shared too."""
        shares = [fragments[rank :: len(self.members)] for rank in range(len(self.members))]
        first = self.members[0].learn.remote(shares[0])
        rest = [member.assist.remote(share) for member, share in zip(self.members[1:], shares[1:], strict=True)]
        return Calls([first, *rest], join_learned)

    def _load_state_dict(self, state: Mapping[str, Any]) -> Calls:
        shared = ray.put(state)
        return Calls([member.load_state_dict.remote(shared) for member in self.members], first_of)

    def _set_others_idle(self, others_idle: bool) -> Calls:
        return Calls([member.set_others_idle.remote(others_idle) for member in self.members], first_of)


def kill(handle: Any) -> None:
    """Kill the process of a handle, or all of a group."""
    for process in handle.members if isinstance(handle, LearnerGroup) else [handle]:
        ray.kill(process)


def first_of(answers: Sequence[Any]) -> Any:
    """Return what process 0 answered."""
    return answers[0]


def join_pulses(pulses: Sequence[Pulse]) -> Pulse:
    """Return one sign of life: what process 0 does and its spans, the operations of all, the longest of the present."""
    done, busy_s = sum(pulse.done for pulse in pulses), max(pulse.busy_s for pulse in pulses)
    return replace(pulses[0], done=done, busy_s=busy_s)


def join_learned(answers: Sequence[Learned | Assisted]) -> Learned:
    """Return the result of process 0, with the lost fragments of all and the joined totals (``joined``)."""
    first, *rest = answers
    assert isinstance(first, Learned)
    assisted = [answer for answer in rest if isinstance(answer, Assisted)]
    lost = first.metrics["async/lost"] + sum(answer.lost for answer in assisted)
    totals = joined([first.totals, *(answer.totals for answer in assisted)])
    return replace(first, metrics=first.metrics | {"async/lost": lost}, totals=totals)
