"""Envs that are not stepped together: rows give what they give when they are, and fragments are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied import train
from embodied.core.errors import UserError
from embodied.core.types import Fragment, Timestep
from embodied.envs import FAMILIES, make_sampler
from embodied.envs.adapters.config import EnvpoolConfig, EnvpoolTaskConfig
from embodied.envs.adapters.envpool.family import RowByRowEnvpoolEnv
from embodied.envs.adapters.envpool.pool import EnvpoolEnv
from embodied.envs.base.actions import random_actions
from embodied.envs.checks.conformance import check_env
from embodied.policies import POLICIES
from embodied.runtime.channel import WeightStore
from embodied.runtime.collecting.actor_server import ActorServer, ActRequest
from embodied.runtime.collecting.env_worker import EnvWorker
from embodied.runtime.ledger import Ticket
from tests.commands.helpers import run

pytest.importorskip("envpool", reason="needs EnvPool: pip install -c constraints.txt -e '.[envpool]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")  # of EnvPool's own spaces
N = 8


def make(id: str, num_envs: int, steps: int, batch_size: int | None) -> EnvpoolEnv:
    family, task = FAMILIES["envpool"].build(), EnvpoolTaskConfig(max_episode_steps=steps)
    sim = EnvpoolConfig(batch_size=batch_size)
    env = family.make(id, task, num_envs=num_envs, num_threads=2, sim=sim)
    assert isinstance(env, EnvpoolEnv)
    assert (env.batch_size is None) == (batch_size is None)
    return env


def rows_of(env: RowByRowEnvpoolEnv, action_TNEA: torch.Tensor) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield decision, env and result of every row, each of which acts as soon as it is done."""
    counts = torch.zeros(N, dtype=torch.int64)
    env.send(action_TNEA[0], torch.arange(N))
    under_way = N
    while under_way:
        rows, step = env.receive()
        under_way -= len(rows)
        assert len(rows) <= env.batch_size
        assert torch.equal(step.episodes.env_id_M, rows[step.final_ids])
        for k, row in enumerate(rows.tolist()):
            final = (step.final_ids == k).nonzero().flatten()
            yield int(counts[row]), row, {
                "obs": step.obs["state"][k], "reward": step.reward_NE[k], "terminated": step.terminated_N[k],
                "truncated": step.truncated_N[k], "num_steps": step.num_steps_N[k],
                "final": step.final_obs["state"][final], "return": step.episodes.return_M[final],
                "length": step.episodes.length_M[final], "number": step.episodes.plans.number_n[final].tolist(),
            }  # fmt: skip
        counts[rows] += 1
        on = rows[counts[rows] < len(action_TNEA)]
        if len(on):
            env.send(action_TNEA[counts[on], on], on)
            under_way += len(on)


@pytest.mark.parametrize(
    ("id", "chunk", "steps", "cut"),
    [("CartPole-v1", 1, 15, 0), ("Hopper-v5", 3, 20, 0), ("FetchReachDense-v4", 3, 40, 2)],
    ids=["one action", "chunks", "cut after success"],
)
def test_rows_give_what_they_give_when_all_are_stepped_together(id: str, chunk: int, steps: int, cut: int) -> None:
    env, together = make(id, N, steps, 3), make(id, N, steps, None)
    env.cut_after_success = together.cut_after_success = cut
    assert isinstance(env, RowByRowEnvpoolEnv)
    action_TNEA = torch.stack([random_actions(env.spec.action, N, chunk, seed=t) for t in range(30)])
    assert torch.equal(env.reset(make_sampler(env))["state"], together.reset(make_sampler(together))["state"])
    found = {(t, row): result for t, row, result in rows_of(env, action_TNEA)}
    assert len(found) == 30 * N
    ends = cuts = 0
    for t, action in enumerate(action_TNEA):
        step = together.step(action)
        for row in range(N):
            result, final = found[t, row], (step.final_ids == row).nonzero().flatten()
            ends += len(final)
            cuts += int((step.episodes.length_M[final] < steps).sum()) if cut else 0
            assert torch.equal(result["obs"], step.obs["state"][row])
            assert torch.equal(result["reward"], step.reward_NE[row])
            assert result["terminated"] == step.terminated_N[row]
            assert result["truncated"] == step.truncated_N[row]
            assert result["num_steps"] == step.num_steps_N[row]
            assert torch.equal(result["final"], step.final_obs["state"][final])
            assert torch.equal(result["return"], step.episodes.return_M[final])
            assert torch.equal(result["length"], step.episodes.length_M[final])
            assert result["number"] == step.episodes.plans.number_n[final].tolist()
    assert ends > N
    assert bool(cuts) == bool(cut)


def test_a_time_limit_ends_an_episode_that_began_row_by_row_and_goes_on_together() -> None:
    env = make("Hopper-v5", N, 8, 3)
    env.reset(make_sampler(env))
    actions = torch.zeros(5, N, 1, *random_actions(env.spec.action, N, 1, seed=0).shape[2:])
    for _ in rows_of(env, actions):
        pass
    step = env.step(actions[0].repeat(1, 6, 1))
    assert bool(step.truncated_N.all())
    assert step.num_steps_N.tolist() == [3] * N


def test_stepped_together_it_keeps_the_contract() -> None:
    check_env(lambda num_envs: make("CartPole-v1", num_envs, 30, 2))


@pytest.mark.parametrize(
    ("id", "policy", "steps", "noise_hold"),
    [("CartPole-v1", "categorical", 6, 1), ("Hopper-v5", "gaussian", 6, 1), ("Hopper-v5", "gaussian", 16, 4)],
    ids=["CartPole", "Hopper", "Hopper falls while noise is held"],
)
def test_fragments_are_those_of_envs_that_are_stepped_together(
    id: str, policy: str, steps: int, noise_hold: int
) -> None:
    """Up to rounding, because a matrix product may round differently in another batch."""
    fragments = [list(sampled(make(id, N, steps, batch_size), policy, noise_hold)) for batch_size in (3, None)]
    assert any(fragment.terminated_TN.any() for fragment in fragments[0]) == (noise_hold > 1)
    for apart, together in zip(*fragments, strict=True):
        for key in ("obs", "last_obs"):
            torch.testing.assert_close(getattr(apart, key), getattr(together, key), atol=1e-4, rtol=1e-4)
        for name in (field.name for field in fields(Fragment) if field.name.endswith(("_TN", "_N", "_TNE", "_TNEA"))):
            torch.testing.assert_close(getattr(apart, name), getattr(together, name), atol=1e-3, rtol=1e-3, msg=name)
        torch.testing.assert_close(apart.chain, together.chain, atol=1e-4, rtol=1e-4)
        assert apart.truncated_TN.any()
        order = (apart.final_index_M2 @ torch.tensor([N, 1])).argsort()
        assert torch.equal(apart.final_index_M2[order], together.final_index_M2)
        final, expected = apart.final_obs["state"][order], together.final_obs["state"]
        torch.testing.assert_close(final, expected, atol=1e-4, rtol=1e-4)
        assert sorted(apart.episodes.env_id_M.tolist()) == sorted(together.episodes.env_id_M.tolist())


def sampled(env: EnvpoolEnv, policy: str, noise_hold: int) -> Iterator[Fragment]:
    """Yield three fragments of an env."""
    torch.manual_seed(0)
    entry = POLICIES[policy]
    actor = entry.build(env.spec, entry.config(**({"horizon": 2, "execute": 2} if policy == "gaussian" else {})))
    store = WeightStore()
    store.publish(0, actor.state_dict())
    server = ActorServer(actor, store, torch.device("cpu"), merge=True)
    worker = EnvWorker([(env, make_sampler(env))], 0, 9, actor.execute, actor.noise_shape, 1, noise_hold=noise_hold)
    for sequence in range(3):
        result: ActRequest | Fragment = worker.start(Ticket(sequence, 0, 0, 0))
        while isinstance(result, ActRequest):
            (reply,) = server.act([result])
            result = worker.advance(reply)
        yield result
    worker.close()


def test_each_decision_has_the_version_of_the_weights_that_drew_it() -> None:
    env = make("CartPole-v1", N, 30, 3)
    torch.manual_seed(0)
    entry, store = POLICIES["categorical"], WeightStore()
    actor = entry.build(env.spec, entry.config())
    weights = [{name: tensor + shift for name, tensor in actor.state_dict().items()} for shift in (0, 0.1)]
    store.publish(0, weights[0])
    server = ActorServer(actor, store, torch.device("cpu"), merge=True)
    worker = EnvWorker([(env, make_sampler(env))], 0, 9, actor.execute, actor.noise_shape, seed=1)
    result: ActRequest | Fragment = worker.start(Ticket(0, 0, 0, 0))
    for request in range(1000):
        if isinstance(result, Fragment):
            break
        if request == 10:
            store.publish(1, weights[1])
        (reply,) = server.act([result])
        result = worker.advance(reply)
    worker.close()
    assert isinstance(result, Fragment)
    assert (result.version_TN.diff(dim=0) >= 0).all()
    for version in range(2):
        actor.load_state_dict(weights[version])
        drawn_TN = result.version_TN == version
        assert drawn_TN.any()
        evaluated = actor.evaluate({"state": result.obs["state"][drawn_TN]}, result.chain[drawn_TN])
        torch.testing.assert_close(evaluated.log_prob_B.detach(), result.log_prob_TN[drawn_TN])
        torch.testing.assert_close(evaluated.value_B.detach(), result.value_TN[drawn_TN])


def test_results_that_break_the_contract_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("CartPole-v1", N, 30, 3)
    assert isinstance(env, RowByRowEnvpoolEnv)
    receive = env.receive

    def without_ends() -> tuple[torch.Tensor, Timestep]:
        rows, step = receive()
        return rows, replace(step, final_ids=step.final_ids[:0])

    monkeypatch.setattr(env, "receive", without_ends)
    with pytest.raises(UserError, match="final_ids must be the rows that terminated"):
        list(sampled(env, "categorical", 1))


def test_groups_of_equal_episodes_are_refused() -> None:
    env = make("CartPole-v1", N, 30, 2)
    assert isinstance(env, RowByRowEnvpoolEnv)
    env.reset(make_sampler(env, group_size=4))
    actions = torch.stack([random_actions(env.spec.action, N, 1, seed=t) for t in range(60)])
    with pytest.raises(UserError, match=r"sim\.batch_size: groups of equal episodes"):
        list(rows_of(env, actions))


@pytest.mark.slow(reason="trains for 16,000 control steps, one result at a time")
def test_a_run_learns_with_rows_as_they_come(tmp_path: Path) -> None:
    words = ["task=envpool/CartPole-v1", "policy=categorical", "num_envs=16", "total_steps=16000", "eval_episodes=16"]
    words += ["sim.batch_size=3", "runtime=local", "runtime.decisions=32", "runtime.eval_every=0"]
    outcome = run(train.main, [*words, f"out={tmp_path / 'run'}"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["env_steps"] >= 16000
    assert outcome.result["eval"]["return_mean"] > 50  # 20 without training
