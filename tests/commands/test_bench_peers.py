"""``bench train`` with peers: other libraries learn on our envs, and all are measured alike."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from embodied import bench
from embodied.benchmarks.peers.compare import PEERS
from embodied.benchmarks.peers.meter import WINDOW, Finished, Meter, metered
from embodied.core.episodes import EpisodePlans, EpisodeStats
from embodied.envs.views.stepper import Stepper
from tests.commands.helpers import run
from tests.runtime.point_env import PointEnv, point_spec

INSTALLED = [peer for peer, package in PEERS.items() if find_spec(package)]
NEEDS = pytest.mark.skipif(
    len(INSTALLED) < len(PEERS), reason="needs the trainers: pip install -c constraints.txt -e '.[trainers]'"
)


def episodes(returns: list[float], limit: int) -> EpisodeStats:
    """Return ended episodes that failed with a time limit."""
    num = len(returns)
    plans, failed = EpisodePlans.empty(num), {"success": torch.zeros(num, dtype=torch.bool)}
    plans.time_limit_n[:] = limit
    return EpisodeStats(torch.arange(num), torch.tensor(returns), torch.ones(num).long(), plans, failed, failed)


@NEEDS
@pytest.mark.slow(reason="imports and trains with three libraries")
def test_all_trainers_are_timed_on_the_same_task() -> None:
    trainers = ["peers=sb3,rsl_rl,torchrl", "ours=local,sync,recipe"]
    outcome = run(bench.main, ["train", "task=reach", *trainers, "short=true", "threads=1", "level=1", "seeds=2"])
    assert outcome.code == 0, outcome.stderr
    result = outcome.result
    ratios = {f"{ours}_over_{peer}" for ours in ("local", "sync") for peer in PEERS}
    assert set(result["ratios"]) == ratios | {"local_over_sync"}  # nobody reached the level
    rows = {row["name"]: row for row in result["rows"]}
    assert "train_recipe" not in rows
    runs = {name: rows[f"time_{name}"]["settings"]["runs"] for name in ("recipe", "local", "sync", *PEERS)}
    assert all([one["seed"] for one in of_name] == [0, 1] for of_name in runs.values())
    assert runs["recipe"][0]["env_steps"] > 256  # an iteration of its own size
    for name in ("local", "sync", *PEERS):
        assert rows[f"train_{name}"]["value"] > 0
        assert [one["env_steps"] for one in runs[name]] == [256, 256]
        assert not any(one["reached"] for one in runs[name])
        assert rows[f"time_{name}"]["value"] == pytest.approx(sum(one["wall_s"] for one in runs[name]) / 2, abs=0.1)


@pytest.mark.slow(reason="UniLab starts two processes for each training")
def test_unilab_is_timed_with_the_shared_settings_and_with_its_own() -> None:
    if not (Path(sys.prefix) / "peers" / "unilab-rl").exists():
        pytest.skip(f"needs UniLab: make peers VENV={sys.prefix}")
    words = ["task=reach", "peers=unilab,unilab_own", "ours=sync", "short=true", "threads=1", "level=1"]
    outcome = run(bench.main, ["train", *words])
    assert outcome.code == 0, outcome.stderr
    assert set(outcome.result["ratios"]) == {"sync_over_unilab"}
    rows = {row["name"]: row for row in outcome.result["rows"]}
    ours, theirs = (rows[f"train_{name}"]["settings"] for name in ("sync", "unilab"))
    assert ours["updates_per_step"] == pytest.approx(4 / 64, abs=1e-6)  # one epoch of 4 minibatches
    assert ours["samples_per_step"] == 1.0
    assert theirs["samples_per_step"] == pytest.approx(16 * theirs["updates_per_step"])  # its learner may miss rollouts
    assert rows["train_sync_cpu"]["value"] > 0 < rows["train_unilab_cpu"]["value"]
    (own,) = rows["time_unilab_own"]["settings"]["runs"]
    assert (own["env_steps"], own["reached"]) == (256, False)


@NEEDS
@pytest.mark.parametrize("peer", ["sb3", "torchrl"])
def test_peers_learn_choices(peer: str) -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install -c constraints.txt -e '.[envpool]'")
    words = ["task=envpool/CartPole-v1", f"peers={peer}", "ours=sync", "short=true", "threads=1"]
    outcome = run(bench.main, ["train", *words])
    assert outcome.code == 0, outcome.stderr
    assert [*outcome.result["ratios"]] == [f"sync_over_{peer}"]


@NEEDS
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=gym/CartPole-v1", "peers=sb3,rsl_rl"], "rsl_rl has no discrete actions, as task gym/CartPole-v1 needs"),
        (
            ["task=reach", "peers=sb3", "ours=recipe"],
            "peers=unilab_own and seeds= are of the time to a level: give level=",
        ),
        (
            ["task=reach", "peers=sb3", "seeds=2"],
            "peers=unilab_own and seeds= are of the time to a level: give level=",
        ),
    ],
)
def test_bad_requests_are_errors_before_anything_trains(words: list[str], message: str) -> None:
    outcome = run(bench.main, ["train", *words, "short=true"])
    assert outcome.code == 2
    assert message in outcome.stderr
    assert "round 1" not in outcome.stderr


@NEEDS
def test_masks_are_refused_because_no_peer_reads_them() -> None:
    outcome = run(bench.main, ["train", "task=gym/tests.envs.toy_gym:MaskedChoice-v0", "peers=sb3", "short=true"])
    assert outcome.code == 2
    assert "forbids some choices by masks, which the peers do not read" in outcome.stderr


def stepper(meter: Meter, decisions: int) -> Stepper:
    return Stepper(metered(PointEnv(3, max_episode_steps=5), meter, decisions))


@NEEDS
def test_last_observations_reach_torchrl() -> None:
    """The views of the other libraries have tests of their own."""
    from embodied.benchmarks.peers.libraries import TorchRLEnv

    plain, torchrl = stepper(Meter(point_spec()), 100), TorchRLEnv(stepper(Meter(point_spec()), 100))
    plain.reset()
    data = torchrl.reset()
    ended = 0
    for action in torch.rand(7, 3, plain.spec.action_dim, generator=torch.Generator().manual_seed(0)):
        step = plain.step(action)
        shown, data = torchrl.step_and_maybe_reset(data.set("action", action))
        assert torch.equal(shown["next", "observation"][step.final_ids], step.final_obs["state"])
        assert torch.equal(shown["next", "truncated"][:, 0], step.truncated_N)
        assert torch.equal(data["observation"], step.obs["state"])
        ended += len(step.final_ids)
    assert ended >= 3


def test_a_training_ends_at_a_boundary() -> None:
    meter = Meter(point_spec(), iterations=2)
    env = stepper(meter, decisions=3)
    env.reset()
    for _ in range(6):
        env.step(torch.zeros(3, env.spec.action_dim))
    with pytest.raises(Finished):
        env.step(torch.zeros(3, env.spec.action_dim))
    assert [mark.env_steps for mark in meter.marks] == [0, 9, 18]
    assert min(meter.rates(warmup=1)[:2]) > 0


def test_the_level_is_that_of_whole_episodes() -> None:
    meter = Meter(replace(point_spec(), outcomes=(), max_episode_steps=9), level=2.0)
    meter.record(episodes([9.0] * WINDOW, limit=5))  # began late: do not count
    assert meter.boundary(0)
    meter.record(episodes([3.0] * (WINDOW - 1), limit=9))
    assert meter.boundary(100)
    assert not meter.reached
    meter.record(episodes([3.0], limit=9))
    assert not meter.boundary(200)
    assert meter.reached
    assert meter.marks[-1].quality == 3.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=reach"], "peers is missing"),
        (["peers=sb3"], "task is missing"),
        (
            ["task=reach", "peers=sb4"],
            "got 'sb4', allowed: rsl_rl, sb3, torchrl, unilab, unilab_own. Did",
        ),
        (["task=reech", "peers=sb3"], "unknown task 'reech'. Did you mean 'reach'?"),
        (["task=reach", "peers=sb3", "ppo.epochs=0"], "ppo.epochs: got 0, allowed: at least 1"),
        (["task=reach", "peers=sb3", "rouds=3"], "Did you mean 'rounds'?"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    outcome = run(bench.main, ["train", *words])
    assert outcome.code == 2
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    outcome = run(bench.main, ["train", "task=reach", "peers=sb3"])
    assert outcome.code == 2
    assert "pip install -c constraints.txt -e '.[trainers]'" in outcome.stderr
    monkeypatch.setattr(sys, "prefix", "/none")
    outcome = run(bench.main, ["train", "task=reach", "peers=unilab"])
    assert outcome.code == 2
    assert "unilab-rl is not installed in /none/peers/unilab-rl: make peers VENV=/none" in outcome.stderr
