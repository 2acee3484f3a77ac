"""What a fragment keeps beyond PPO's needs: transitions, versions and incarnations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from embodied.algos.batch import merge_fragments
from embodied.algos.returns import gae
from embodied.core.episodes import PlanList
from embodied.core.types import Transitions
from embodied.envs.base.episodic import Advance
from embodied.envs.episodes.sampler import first_episodes
from embodied.runtime.channel import WeightStore
from embodied.runtime.collecting.actor_server import ActRequest
from embodied.runtime.collecting.env_worker import EnvWorker, GroupRollout
from embodied.runtime.ledger import Ticket
from tests.runtime.point_env import LIMIT, PointEnv, point_sampler
from tests.runtime.test_env_worker import SEED, N, T, make_env, make_server, make_worker, sample


def assert_continues(transitions: Transitions) -> None:
    """Check every transition against the point mass's own equation of motion."""
    position_B2, time_B = transitions.obs["state"][:, :2], transitions.obs["state"][:, 2]
    assert torch.equal(transitions.action_BEA, transitions.action_BEA.clamp(-1, 1))
    for b, steps in enumerate(transitions.num_steps_B.tolist()):
        moved = position_B2[b] + 0.1 * transitions.action_BEA[b, :steps].sum(0)
        torch.testing.assert_close(transitions.next_obs["state"][b, :2], moved)
        torch.testing.assert_close(transitions.next_obs["state"][b, 2], time_B[b] + steps / 6)
        outside = bool((moved.abs() > LIMIT).any())
        assert outside == bool(transitions.terminated_B[b])
        assert (transitions.reward_BE[b, steps:] == 0).all()
        torch.testing.assert_close(transitions.reward_BE[b, steps - 1], -moved.norm())


def test_every_transition_of_a_fragment_continues_its_own_episode() -> None:
    """Chunks of two steps, time limits of six: each env ends two episodes or more, some of them outside the square."""
    server, _ = make_server()
    with torch.no_grad():  # drive to a corner, so that some leave the square
        server.policy.actor[-1].bias.fill_(1.0)
    server.store.publish(1, server.policy.state_dict())
    worker = make_worker(server)
    fragments = [sample(worker, server, sequence) for sequence in range(3)]
    for fragment in fragments:
        ends = fragment.terminated_TN | fragment.truncated_TN
        assert len(fragment.final_index_M2) == int(ends.sum())
        assert_continues(fragment.transitions())
    assert any(fragment.terminated_TN.any() for fragment in fragments)
    assert all(fragment.truncated_TN.any() for fragment in fragments)
    assert int((fragments[0].terminated_TN | fragments[0].truncated_TN).sum(0).max()) >= 2
    assert any((fragment.num_steps_TN == 1).any() for fragment in fragments), "some episodes end inside a chunk"


def test_merged_fragments_have_the_transitions_of_their_parts() -> None:
    server, _ = make_server(merge=False)
    worker = make_worker(server, groups=2)
    parts = [sample(worker, server, sequence, group) for sequence, group in ((0, 0), (1, 1))]
    merged = merge_fragments(parts[::-1]).transitions()
    assert_continues(merged)
    for name in ("action_BEA", "reward_BE", "num_steps_B"):
        joined = torch.cat([getattr(part.transitions(), name).unflatten(0, (T, N)) for part in parts], 1)
        assert torch.equal(getattr(merged, name), joined.flatten(0, 1))


def test_weights_carry_the_version_of_each_tensor() -> None:
    store, state = WeightStore(), {"frozen": torch.zeros(2), "trained": torch.zeros(2)}
    for version in (3, 4):
        store.publish(version, state, frozen={"frozen"})
        state["trained"] += 1
    weights = store.latest()
    assert weights.version == 4
    assert dict(weights.changed) == {"frozen": 3, "trained": 4}
    assert weights.tensors["trained"].tolist() == [1.0, 1.0], "a snapshot is a copy"


def test_a_replaced_worker_draws_other_noise_and_other_episodes() -> None:
    server, _ = make_server()

    def worker_of(incarnation: int) -> EnvWorker:
        env, _ = make_env()
        sampler = point_sampler(env.spec, N, 0, incarnation)
        return EnvWorker([(env, sampler)], 0, T, 2, server.policy.noise_shape, SEED, incarnation)

    def rollout_of(incarnation: int) -> GroupRollout:
        return worker_of(incarnation).rollouts[0]

    def first_request(incarnation: int, state: Mapping[str, Any] | None = None) -> ActRequest:
        worker = worker_of(incarnation)
        if state is not None:
            worker.rollouts[0].load_state_dict(state)
        return worker.start(Ticket(0, 0, 0, incarnation))

    before, same, after = first_request(0), first_request(0), first_request(1)
    assert before.noise is not None
    assert after.noise is not None
    assert torch.equal(before.noise, same.noise)
    assert torch.equal(before.obs["state"], same.obs["state"])
    assert not torch.equal(before.noise, after.noise)
    resumed = first_request(0, rollout_of(1).state_dict()).noise
    assert resumed is not None
    assert torch.equal(resumed, after.noise), "a run that is resumed goes on with the noise of the replacement"
    assert not (before.obs["state"] == after.obs["state"]).all(-1).any()


def test_actions_beyond_the_limits_are_recorded_as_they_are_executed() -> None:
    server, _ = make_server()
    with torch.no_grad():
        server.policy.actor[-1].bias.fill_(3.0)
    server.store.publish(1, server.policy.state_dict())
    fragment = sample(make_worker(server), server, 0)
    assert (fragment.action_TNEA == 1.0).float().mean() > 0.9


def test_an_env_that_reuses_its_buffers_does_not_change_a_fragment() -> None:
    class Reusing(PointEnv):
        """Returns the same tensors from every call, overwritten."""

        buffer: torch.Tensor | None = None

        def observe(self, ids: Any = None) -> dict[str, torch.Tensor]:
            state = super().observe(ids)["state"]
            if ids is not None:
                return {"state": state}
            if self.buffer is None:
                self.buffer = state
            self.buffer.copy_(state)
            return {"state": self.buffer}

    server, _ = make_server()
    env = Reusing(N, max_episode_steps=6)
    worker = EnvWorker([(env, point_sampler(env.spec, N, 0))], 0, T, 2, server.policy.noise_shape, SEED)
    fragment = sample(worker, server, 0)
    before = fragment.transitions().next_obs["state"].clone()
    sample(worker, server, 1)
    assert torch.equal(fragment.transitions().next_obs["state"], before)
    assert_continues(fragment.transitions())


def test_a_decision_in_which_the_simulation_diverged_counts_for_nothing() -> None:
    """It is masked, it is in no transition, and what came before it bootstraps from its own observation's value."""

    class Fragile(PointEnv):
        """Env 1 diverges whenever its episode has lasted three steps, inside a chunk."""

        def advance(self, action_NA: torch.Tensor, ids: Any) -> Advance:
            result = super().advance(action_NA, ids)
            broken_N = torch.arange(N) == 1 if int(self.steps_left_N[1]) == 4 else None
            return replace(result, broken_N=broken_N)

    server, _ = make_server()
    env = Fragile(N, max_episode_steps=6)
    worker = EnvWorker([(env, first_sampler(N))], 0, T, 2, server.policy.noise_shape, SEED)
    fragment = sample(worker, server, 0)
    t = 1  # env 1: the second chunk, in its first action
    assert fragment.num_steps_TN[:3, 1].tolist() == [2, 0, 2]
    assert fragment.truncated_TN[t, 1]
    assert not fragment.reward_TNE[t, 1].any()
    assert fragment.final_value_TN[t, 1] == fragment.value_TN[t, 1]
    assert len(fragment.transitions().num_steps_B) == int((fragment.num_steps_TN > 0).sum()) < T * N
    advantage_TN, return_TN = gae(fragment, 0.9, 0.8)
    assert advantage_TN[t, 1].abs() < 1e-6
    reward = fragment.reward_TNE[0, 1] @ torch.tensor([1.0, 0.9])
    torch.testing.assert_close(return_TN[0, 1], reward + 0.9**2 * fragment.value_TN[t, 1])


def first_sampler(num_envs: int) -> PlanList:
    """Full-length episodes from the first step."""
    return PlanList(first_episodes(PointEnv(1, max_episode_steps=6).spec, num_envs, 0), num_envs)
