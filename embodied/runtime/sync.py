"""All parts in one process; in ``SyncRuntime`` pumped in turn by one thread: exact, and debuggable anywhere.

every group: start ──► [ actor.act(all requests) ──► every group: advance ] x (T + 1) ──► batch ──► learn
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from embodied.core.algorithm import Metrics
from embodied.core.device import CPU
from embodied.core.env import VecEnv
from embodied.core.types import Fragment
from embodied.runtime import threads
from embodied.runtime.channel import WeightStore
from embodied.runtime.collecting.actor_server import ActorServer, ActRequest
from embodied.runtime.learner import Learner
from embodied.runtime.loop import Runtime
from embodied.runtime.recipe import Recipe
from embodied.runtime.watch import Totals, Track, joined


class OneProcess(Runtime):
    """Base class that builds all parts. Observations and actions stay on a device that simulator and learner share."""

    learner: Learner

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        with ExitStack() as opened:  # closes the envs if anything is refused
            envs: list[list[VecEnv]] = []
            for worker in range(len(recipe.sizes)):
                envs.append(recipe.open_envs(worker, threads.sim_threads(self.config)))
                for env in envs[-1]:
                    opened.callback(env.close)
            self.spec, to = envs[0][0].spec, recipe.device
            policy = recipe.initial_policy(self.spec)
            policy.to(to)
            self.budget = recipe.budget_of(policy, self.spec)
            acting, evaluated = policy.duplicate(), policy.duplicate()
            resident = all(
                env.device.type == to.type and (env.device.index or 0) == (to.index or 0) and env.batch_size is None
                for groups in envs
                for env in groups
            )
            self.evaluator = recipe.evaluator(evaluated, self.spec, self.budget, self.threads)
            opened.callback(self.evaluator.close)
            shape, device = (policy.execute, policy.noise_shape), to if resident else CPU
            self.workers = [recipe.env_worker(i, groups, *shape, device=device) for i, groups in enumerate(envs)]
            store = WeightStore()
            self.actor = ActorServer(acting, store, to, merge=self.config.max_staleness > 0, resident=resident)
            self.learner = Learner(recipe.make_algorithm(policy), store, self.config.mask_above)
            self._incarnations = [0] * len(self.workers)
            self.opened = opened.pop_all()

    @property
    def incarnations(self) -> list[int]:
        return list(self._incarnations)

    @property
    def resumes_exactly(self) -> bool:
        return all(worker.resumes_exactly for worker in self.workers)

    def _group_states(self) -> Sequence[dict[str, Any] | None]:
        return [self.workers[worker].rollouts[group].state_dict() for worker, group in self.groups]

    def _load_groups(self, states: Sequence[Mapping[str, Any] | None], incarnations: Sequence[int]) -> None:
        for (worker, group), state in zip(self.groups, states, strict=True):
            self.workers[worker].rollouts[group].load_state_dict(state)
        self._incarnations[: len(incarnations)] = incarnations[: len(self.workers)]

    def _totals(self) -> dict[str, Totals]:
        return {
            "env_worker": joined([worker.track.totals() for worker in self.workers]),
            "actor_server": self.actor.track.totals(),
            "learner": self.learner.track.totals(),
        }

    def _tracks(self) -> dict[str, list[Track]]:
        tracks = {worker.track.name: worker.tracks for worker in self.workers}
        return tracks | {part.track.name: [part.track] for part in (self.actor, self.learner, self.evaluator)}


class SyncRuntime(OneProcess):
    """Parts in one thread. The batches are the same as those of ``LocalRuntime`` with max_staleness=0."""

    def collect(self) -> list[Fragment]:
        threads.use(self.budget.actor)
        requests: list[ActRequest] = []
        for worker, group in self.groups:
            ticket = self.ledger.try_acquire(worker, group=group)
            assert ticket is not None, "one thread: nothing else can be in flight"
            requests.append(self.workers[worker].start(ticket))
        batch: list[Fragment] = []
        while requests:
            results = [self.workers[reply.worker].advance(reply) for reply in self.actor.act(requests)]
            requests = [result for result in results if isinstance(result, ActRequest)]
            batch += [result for result in results if isinstance(result, Fragment)]
        for fragment in batch:
            admitted = self.ledger.deliver(self.workers[fragment.worker].rollouts[fragment.group].ticket)
            assert admitted
        return batch

    def learn(self, batch: Sequence[Fragment]) -> Metrics:
        threads.use(self.budget.learner)
        return self.learner.learn(batch)
