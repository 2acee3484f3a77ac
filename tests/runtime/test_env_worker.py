"""Fragments hold what a plain rollout, written out by hand, sees."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from embodied.core.seeds import Purpose, first_env_seed
from embodied.core.types import Fragment
from embodied.envs.episodes.sampler import UniformSampler
from embodied.runtime.channel import WeightStore
from embodied.runtime.collecting.actor_server import ActorServer, ActRequest
from embodied.runtime.collecting.env_worker import EnvWorker
from embodied.runtime.ledger import Ticket
from tests.runtime.builders import make_policy
from tests.runtime.point_env import PointEnv, point_sampler

CPU = torch.device("cpu")
N, T, SEED = 16, 7, 5


def make_server(merge: bool = True) -> tuple[ActorServer, WeightStore]:
    torch.manual_seed(0)
    policy = make_policy(PointEnv(1).spec)
    store = WeightStore()
    store.publish(0, policy.state_dict())
    return ActorServer(policy, store, CPU, merge), store


def make_env(max_episode_steps: int = 6) -> tuple[PointEnv, UniformSampler]:
    env = PointEnv(N, max_episode_steps)
    return env, point_sampler(env.spec, N, first_env_seed(Purpose.TRAINING, SEED))


def make_worker(server: ActorServer, groups: int = 1) -> EnvWorker:
    envs = [make_env() for _ in range(groups)]
    return EnvWorker(envs, 0, T, server.policy.execute, server.policy.noise_shape, SEED)


def sample(worker: EnvWorker, server: ActorServer, sequence: int, group: int = 0) -> Fragment:
    result: ActRequest | Fragment = worker.start(Ticket(sequence, 0, group, 0))
    while isinstance(result, ActRequest):
        (reply,) = server.act([result])
        result = worker.advance(reply)
    return result


def test_every_fourth_env_holds_its_noise_and_the_others_have_the_same_as_without() -> None:
    (white, held) = (EnvWorker([make_env()], 0, T, 2, (3,), SEED, noise_hold=hold).rollouts[0] for hold in (1, 3))
    drawn, kept = (torch.stack([rollout.draw_noise() for _ in range(6)]) for rollout in (white, held))
    holding = torch.arange(N) % 4 == 3
    assert torch.equal(drawn[:, ~holding], kept[:, ~holding])
    assert torch.equal(kept[:3, holding], kept[:1, holding].expand(3, -1, -1))
    assert not (kept[3, holding] == kept[2, holding]).any()
    assert not torch.isin(kept[:, holding], drawn).any()
    for rollout in (white, held):
        rollout._drawn = 3 * 128
    assert torch.equal(white.draw_noise(), held.draw_noise())


def test_an_env_stops_holding_its_noise_once_an_episode_of_it_ended_early_and_a_resumed_one_too() -> None:
    server, _ = make_server()
    worker = EnvWorker([make_env(60)], 0, T, server.policy.execute, server.policy.noise_shape, SEED, noise_hold=3)
    (rollout,), ended = worker.rollouts, torch.zeros(N, dtype=torch.bool)
    for sequence in range(40):
        ended |= sample(worker, server, sequence).terminated_TN.any(0)
        holding = (torch.arange(N) % 4 == 3) & ~ended
        assert torch.equal(rollout._holding_N, holding)
    assert ended[3::4].any()
    assert not ended[3::4].all()
    (resumed,) = EnvWorker([make_env(60)], 0, T, 2, server.policy.noise_shape, SEED, noise_hold=3).rollouts
    resumed.load_state_dict(rollout.state_dict())
    assert torch.equal(resumed._holding_N, holding)


def test_noise_that_is_drawn_ahead_is_held_by_the_same_envs() -> None:
    """As beside a simulator on a GPU; a resumed run has nothing that was drawn ahead."""
    server, _ = make_server()
    workers = [EnvWorker([make_env(60)], 0, T, 2, server.policy.noise_shape, SEED, noise_hold=3) for _ in range(2)]
    workers[0].rollouts[0]._drawer = ThreadPoolExecutor(1)
    ended = torch.zeros(N, dtype=torch.bool)
    for sequence in range(40):
        drawn, later = (sample(worker, server, sequence) for worker in workers)
        ended |= drawn.terminated_TN.any(0)
        assert torch.equal(drawn.chain, later.chain)
    assert ended[3::4].any()


def test_two_fragments_match_a_rollout_by_hand() -> None:
    server, _ = make_server()
    worker = make_worker(server)
    policy = server.policy
    env, sampler = make_env()
    key = np.random.SeedSequence((SEED, 0, 0, 0)).generate_state(2, np.uint64)
    obs = env.reset(sampler)
    for sequence in range(2):
        fragment = sample(worker, server, sequence)
        truncations = 0
        for t in range(T):
            philox = np.random.Generator(np.random.Philox(key=key, counter=(sequence * T + t) << 128))
            noise = philox.standard_normal((N, *policy.noise_shape), np.float32)
            drawn = policy.act(obs, torch.from_numpy(noise))
            step = env.step(drawn.action_NHA[:, :2])
            torch.testing.assert_close(fragment.obs["state"][t], obs["state"])
            torch.testing.assert_close(fragment.chain[t], drawn.chain)
            torch.testing.assert_close(fragment.log_prob_TN[t], drawn.log_prob_N)
            torch.testing.assert_close(fragment.value_TN[t], drawn.value_N)
            torch.testing.assert_close(fragment.reward_TNE[t], step.reward_NE)
            assert torch.equal(fragment.num_steps_TN[t], step.num_steps_N)
            assert torch.equal(fragment.terminated_TN[t], step.terminated_N)
            assert torch.equal(fragment.truncated_TN[t], step.truncated_N)
            final = torch.zeros(N)
            final[step.final_ids] = policy.value(step.final_obs).detach()
            torch.testing.assert_close(fragment.final_value_TN[t], torch.where(step.truncated_N, final, 0.0))
            truncations += int(step.truncated_N.sum())
            obs = step.obs
        torch.testing.assert_close(fragment.bootstrap_value_N, policy.value(obs).detach())
        assert truncations > 0, "the test must see truncations"
        assert len(fragment.episodes.env_id_M) == int((fragment.terminated_TN | fragment.truncated_TN).sum())
        assert fragment.num_env_steps == int(fragment.num_steps_TN.sum())
        assert torch.equal(fragment.version_TN, torch.zeros(T, N, dtype=torch.int64))
        assert fragment.sequence == sequence


def test_workers_whose_32_bit_seeds_are_equal_draw_different_noise() -> None:
    """Of 100,000 workers a pair is expected to agree in the first 32 bits of their seed sequences. These do."""
    first, second = (int(np.random.SeedSequence((0, n, 0, 0)).generate_state(1)[0]) for n in (50_699, 55_170))
    assert first == second
    policy = make_policy(PointEnv(1).spec)
    drawn = []
    for number in (50_699, 55_170):
        worker = EnvWorker([make_env()], number, T, policy.execute, policy.noise_shape, seed=0)
        request = worker.start(Ticket(0, number, 0, 0))
        assert request.noise is not None
        drawn.append(request.noise)
    assert not torch.isclose(*drawn).any()


def test_truncation_at_the_last_decision_has_its_final_value() -> None:
    server, _ = make_server()
    worker = make_worker(server)
    fragments = [sample(worker, server, sequence) for sequence in range(3)]
    last = torch.stack([fragment.truncated_TN[-1] for fragment in fragments])
    values = torch.stack([fragment.final_value_TN[-1] for fragment in fragments])
    assert last.any()
    assert (values[last] != 0).all()
    assert (values[~last] == 0).all()


def test_versions_are_those_of_the_weights_really_used() -> None:
    server, store = make_server()
    worker = make_worker(server)
    result: ActRequest | Fragment = worker.start(Ticket(0, 0, 0, 0))
    published: list[dict[str, Tensor]] = []
    t = 0
    while isinstance(result, ActRequest):
        if t == 3:
            state = {name: tensor + 0.01 for name, tensor in server.policy.state_dict().items()}
            store.publish(1, state)
            published.append(state)
        (reply,) = server.act([result])
        result = worker.advance(reply)
        t += 1
    assert result.version_TN[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    server.policy.load_state_dict(published[0])
    again = server.policy.evaluate({"state": result.obs["state"][3]}, result.chain[3])
    torch.testing.assert_close(again.log_prob_B, result.log_prob_TN[3])


def test_fragments_do_not_share_memory() -> None:
    server, _ = make_server()
    worker = make_worker(server)
    first = sample(worker, server, 0)
    kept = first.obs["state"].clone(), first.reward_TNE.clone(), first.bootstrap_value_N.clone()
    sample(worker, server, 1)
    assert torch.equal(kept[0], first.obs["state"])
    assert torch.equal(kept[1], first.reward_TNE)
    assert torch.equal(kept[2], first.bootstrap_value_N)


def test_merged_requests_get_what_separate_ones_get() -> None:
    """Groups at different points: one wants actions, one values, one has truncated episodes to be valued."""
    merged, _ = make_server(merge=True)
    separate, _ = make_server(merge=False)
    worker = make_worker(separate, groups=3)
    requests = [worker.start(Ticket(group, 0, group, 0)) for group in range(3)]
    for _ in range(T + 1):
        for one, other in zip(merged.act(requests), separate.act(requests), strict=True):
            assert (one.worker, one.group) == (other.worker, other.group)
            for name in ("value_N", "final_value_M"):
                assert (getattr(one, name) is None) == (getattr(other, name) is None)
                if getattr(one, name) is not None:
                    torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=1e-6)
            assert (one.sample is None) == (other.sample is None)
            if one.sample is not None:
                assert other.sample is not None
                for name in ("action_NHA", "log_prob_N", "value_N", "chain"):
                    torch.testing.assert_close(
                        getattr(one.sample, name), getattr(other.sample, name), rtol=1e-6, atol=1e-6
                    )
        results = [worker.advance(reply) for reply in separate.act(requests[:2])]
        requests[:2] = [
            result if isinstance(result, ActRequest) else worker.start(Ticket(9, 0, result.group, 0))
            for result in results
        ]


def test_groups_explore_differently_and_reproducibly() -> None:
    server, _ = make_server()
    runs = []
    for order in ((0, 1), (1, 0)):
        worker = make_worker(server, groups=2)
        runs.append({group: sample(worker, server, group, group).chain for group in order})
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])
