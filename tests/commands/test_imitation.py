"""Demonstrations, imitation, RL from it: the commands of the few-demonstrations path, and what they refuse."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied.collect import CollectConfig, cut, disturbances, record, shares
from embodied.core.spec import ActionTerm, Box, EnvSpec
from embodied.data import read
from embodied.envs.tasks.config import default_words
from embodied.report.metrics import read_metrics
from embodied.runtime import checkpoint
from embodied.session.config import compose_run
from embodied.session.factories import make_env, make_spec
from tests.commands.helpers import (
    SMALL,
    Outcome,
    assert_ends_alike,
    imitation_ends_after,
    run_collect,
    run_eval,
    run_train,
)
from tests.runtime.point_env import PointEnv

TINY = ["task=reach", "device=cpu", "policy.actor_hidden=[16]", "policy.critic_hidden=[16]", "policy.head_hidden=[16]"]
SFT = [*TINY, "algo=sft", "algo.updates=40", "algo.validate_every=10", "eval_episodes=4"]
RL = [word for word in SMALL if not word.startswith(("task=", "policy"))] + TINY


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six demonstrations of reach."""
    path = tmp_path_factory.mktemp("demos") / "reach"
    outcome = run_collect("task=reach", "episodes=6", f"out={path}", "num_threads=1")
    assert outcome.code == 0, outcome.stderr
    return path


@pytest.fixture(scope="module")
def imitated(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A finished imitation of them. Read-only."""
    path = tmp_path_factory.mktemp("runs") / "sft"
    outcome = run_train(*SFT, f"data={demos}", f"out={path}")
    assert outcome.code == 0, outcome.stderr
    return path, outcome


# -- collect -----------------------------------------------------------------------------------------------------------
def test_collect_keeps_successes_and_says_so(demos: Path, tmp_path: Path) -> None:
    outcome = run_collect("task=push", "episodes=5", f"out={tmp_path / 'push'}", "num_threads=1")
    assert outcome.code == 0, outcome.stderr
    result, data = outcome.result, read(tmp_path / "push")
    assert (result["task"], result["episodes"], result["frames"]) == ("push", 5, len(data.state_FS))
    assert result["tried"] >= 5
    assert 0 < result["success_rate"] <= 1
    frames = pq.read_table(tmp_path / "push" / "data" / "chunk-000" / "file-000.parquet").to_pylist()
    last = [frame for frame in frames if frame["next.done"]]
    assert len(last) == 5
    assert all(frame["next.success"] for frame in last)
    assert data.action_FA.abs().max() <= 1


def test_collect_is_repeatable_and_seeds_differ(demos: Path, tmp_path: Path) -> None:
    for name, words in (("same", []), ("other", ["seed=1"])):
        assert run_collect("task=reach", "episodes=6", f"out={tmp_path / name}", "num_threads=1", *words).code == 0
    first = read(demos)
    assert torch.equal(first.state_FS, read(tmp_path / "same").state_FS)
    assert not torch.equal(first.state_FS[0], read(tmp_path / "other").state_FS[0])


def test_an_episode_is_cut_after_it_stays_solved() -> None:
    unsolved, solved = [False] * 5, [True] * 8
    assert cut(torch.tensor(unsolved + solved), 3) == 8
    assert cut(torch.tensor([True, False, *solved]), 3) == 5
    assert cut(torch.tensor(unsolved + solved), 100) == 13
    assert cut(torch.tensor(solved + unsolved), 3) == 13
    assert cut(torch.tensor(unsolved + solved), 0) == 6, "its last frame is solved"


def test_a_recording_ends_with_its_episode() -> None:
    """The expert drives the point masses out of their square; what follows is another episode."""

    class Driven(PointEnv):
        def expert(self) -> torch.Tensor:
            return torch.ones(self.num_envs, 2)

    env = Driven(16)
    episodes = record(env, lambda obs: env.expert(), CollectConfig(out="none", noise=0.0, hold_steps=99), seed=0)
    lengths = [len(episode) for episode in episodes]
    assert min(lengths) < 20
    for episode in episodes:
        moved_L2 = episode.state_LS[1:, :2] - episode.state_LS[:-1, :2]
        torch.testing.assert_close(moved_L2, torch.full_like(moved_L2, 0.1))


def test_disturbances_leave_the_gripper_alone_and_last() -> None:
    arm = Box(tuple(ActionTerm(name) for name in ("dx", "dy", "left_gripper", "gripper")))
    spec = replace(EnvSpec.of_sizes("t", state=3, privileged=1, action=4, max_episode_steps=40), action=arm)
    options = CollectConfig("x", noise=0.5, noise_steps=4)
    action = disturbances(spec, 50, options, np.random.default_rng(0))
    assert action.shape == (50, 40, 4)
    assert action[..., 2:].isnan().all()
    noisy = ~action[..., 0].isnan()
    assert 0.4 < noisy.float().mean() < 0.6
    blocks = action[..., :2].unflatten(1, (10, 4))
    assert torch.equal(blocks.nan_to_num(9), blocks[:, :, :1].nan_to_num(9).expand_as(blocks))
    none = disturbances(spec, 5, CollectConfig("x", noise=0.0), np.random.default_rng(0))
    assert none.isnan().all()


# -- imitation ---------------------------------------------------------------------------------------------------------
def test_imitation_leaves_a_run(imitated: tuple[Path, Outcome]) -> None:
    path, outcome = imitated
    assert outcome.result["env_steps"] == 0
    assert outcome.result["iterations"] == 40
    assert outcome.result["eval"]["episodes"] == 4
    rows = read_metrics(path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [10, 20, 30, 40]
    assert rows[-1]["train/imitation_loss"] < rows[0]["train/imitation_loss"]
    assert outcome.result["validation_loss"] == min(row["train/validation_loss"] for row in rows)
    assert "5 episodes to train on" in outcome.stderr
    judged = run_eval(f"run={path}", "episodes=4", "seed=0", "num_threads=1")
    assert judged.code == 0, judged.stderr
    assert judged.result["success_at_end"] == outcome.result["eval"]["success_at_end"]
    assert judged.result["return_mean"] == pytest.approx(outcome.result["eval"]["return_mean"], rel=1e-4)


def test_imitation_that_was_stopped_goes_on_exactly(
    imitated: tuple[Path, Outcome], demos: Path, tmp_path: Path
) -> None:
    path = tmp_path / "sft"
    with imitation_ends_after(25):
        stopped = run_train(*SFT, f"data={demos}", f"out={path}")
    assert stopped.code == 130
    assert stopped.result["iterations"] == 25
    resumed = run_train(f"resume={path}")
    assert resumed.code == 0, resumed.stderr
    assert [row["iteration"] for row in read_metrics(path / "metrics.jsonl")] == [10, 20, 30, 40]
    assert_ends_alike(path, imitated[0])


@pytest.mark.parametrize(("minutes", "saved"), [("0", 20), ("60", None)], ids=["from a checkpoint", "anew"])
def test_imitation_that_failed_goes_on_exactly(
    minutes: str, saved: int | None, imitated: tuple[Path, Outcome], demos: Path, tmp_path: Path
) -> None:
    path = tmp_path / "sft"
    with imitation_ends_after(25, FloatingPointError("loss nan")):
        failed = run_train(*SFT, f"data={demos}", f"out={path}", f"checkpoint_minutes={minutes}")
    assert failed.code == 1
    found = checkpoint.load_latest(path)
    assert (None if found is None else found.state["algorithm"]["updates"]) == saved
    resumed = run_train(f"resume={path}")
    assert resumed.code == 0, resumed.stderr
    assert [row["iteration"] for row in read_metrics(path / "metrics.jsonl")] == [10, 20, 30, 40]
    assert_ends_alike(path, imitated[0])


def test_imitation_keeps_to_its_minutes(demos: Path, tmp_path: Path) -> None:
    words = ["algo.updates=1000000", "algo.validate_every=1000000", "max_minutes=0.01", "eval_episodes=0"]
    outcome = run_train(*SFT, *words, f"data={demos}", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert 0 < outcome.result["iterations"] < 100_000
    assert outcome.result["validation_loss"] > 0


def test_reinforcement_learning_starts_from_the_imitation(imitated: tuple[Path, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "rl"
    words = [*RL, f"init={imitated[0]}", f"out={path}", "algo.learning_rate=0.0", "algo.schedule=fixed"]
    outcome = run_train(*words, "total_steps=256")
    assert outcome.code == 0, outcome.stderr
    before, after = (checkpoint.load_latest(run, only="policy").state for run in (imitated[0], path))  # type: ignore[union-attr]
    actor = [key for key in before if not key.startswith(("critic.", "noise_network."))]
    names = make_spec(compose_run({"task": "reach"})).state_names
    shown = torch.tensor([not name.startswith("finger") for name in names])  # the gripper was open in all episodes
    for key in actor:
        if key.startswith("state_normalizer.") and before[key].ndim:
            assert torch.equal(before[key][shown], after[key][shown]), key
            assert not torch.equal(before[key][~shown], after[key][~shown]), key
        else:
            assert torch.equal(before[key], after[key]), key
    assert not torch.equal(before["critic.network.0.weight"], after["critic.network.0.weight"])
    more = run_train(f"resume={path}", "total_steps=512")
    assert more.code == 0, more.stderr


def test_exploration_is_as_configured_whatever_the_imitation_was(
    imitated: tuple[Path, Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "rl"
    words = [*RL, f"init={imitated[0]}", f"out={path}", "total_steps=64", "eval_episodes=0"]
    assert run_train(*words, "policy.exploration=flow_sde", "policy.stochastic_steps=one").code == 0


# -- instructions ------------------------------------------------------------------------------------------------------
def test_few_demonstrations_show_every_word_of_the_goals_that_are_trained_on() -> None:
    env = make_env(compose_run({"task": "tabletop"}), 1, 1)
    env.close()
    chosen = shares(env.spec, 9)
    assert sorted(chosen.values()) == [0] * 9 + [1] * 9
    named = Counter(word for goal, count in chosen.items() if count for word in goal.split())
    assert {word for goal in chosen for word in goal.split()} == set(named)
    assert [named[word] for word in ("cube", "ball", "cylinder")] == [3, 3, 3]
    assert set(shares(env.spec, 40).values()) == {2, 3}


def test_instructed_demonstrations_are_balanced_and_evaluation_tells_splits_apart(tmp_path: Path) -> None:
    demos, run = tmp_path / "demos", tmp_path / "run"
    words = ("task=tabletop", "episodes=20", "num_threads=1", f"out={demos}")
    outcome = run_collect(*words)
    assert outcome.code == 0, outcome.stderr
    data, instructions = read(demos), default_words().instructions
    first = [data.instructions[data.instruction_F[data.episode_F == e][0]] for e in range(20)]
    goals = Counter(next(one.goal for one in instructions if one.text == text) for text in first)
    trained = [one.goal for one in instructions if one.split == "train"]
    assert set(goals) == set(trained)
    assert sorted(goals.values()) == [1] * 16 + [2] * 2
    outcome = run_train(*SFT, "task=tabletop", f"data={demos}", f"out={run}", "eval_episodes=0")
    assert outcome.code == 0, outcome.stderr
    judged = run_eval(f"run={run}", "episodes=6", "num_threads=1")
    assert judged.code == 0, judged.stderr
    assert {split: rates["episodes"] for split, rates in judged.result["splits"].items()} == {"train": 3, "held_out": 3}
    assert "instructions of split held_out: success 0.0% (0.0% to 56.1%) of 3 episodes" in judged.stderr


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["noise=1.5"], "noise: got 1.5, allowed: at least 0 and below 1"),
        (["episodes=0"], "episodes: got 0, allowed: at least 1"),
        (
            ["episode=3"],
            "unknown key 'episode'. Did you mean 'episodes'? Allowed: cameras, device, episodes, expert, hold",
        ),
        (["task=raech"], "unknown task 'raech'. Did you mean 'reach'?"),
        (["cameras=front"], "cameras: got 'front', allowed: a list, such as [front]"),
        (["cameras=[front,front]"], "cameras: got the names ['front', 'front'], allowed: one at least, each once"),
        (["cameras=[front]", "sim.camera_randomization.fovy_deg=40"], "fovy_deg: got 40, allowed for camera 'front'"),
    ],
)
def test_collect_refuses(words: list[str], message: str, tmp_path: Path) -> None:
    outcome = run_collect("task=reach", *words, f"out={tmp_path / 'x'}")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_collect_never_overwrites(demos: Path) -> None:
    outcome = run_collect("task=reach", f"out={demos}")
    assert outcome.code == 2
    assert "exists" in outcome.stderr


def test_train_refuses_data_that_does_not_fit(demos: Path, imitated: tuple[Path, Outcome], tmp_path: Path) -> None:
    out = tmp_path / "run"
    cases = [
        ([*SFT], "data=<directory of embodied.collect> is missing"),
        ([*SFT, f"data={tmp_path / 'none'}"], "is not a LeRobotDataset"),
        ([*RL, f"data={demos}"], "is for algo=sft; ppo learns from its own experience"),
        ([*SFT, f"data={demos}", "task=lift"], "task lift has"),
        ([*RL, f"init={tmp_path / 'none'}"], "is not a directory"),
        ([*RL, f"init={imitated[0]}", "task=push"], "is a run of task reach, this one is of push"),
        ([*RL, f"init={imitated[0]}", "task.control.delta_m=0.02"], "action 'dx' was"),
        (["task=reach", f"init={imitated[0]}", "policy=gaussian"], "policy=gaussian takes a GaussianPolicy on a state"),
        (["task=reach", f"init={imitated[0]}", "policy=vla_tiny"], "policy=vla_tiny takes a VLAPolicy on cameras"),
        ([*RL, f"init={imitated[0]}", "policy.actor_hidden=[8]"], "has a policy of another architecture"),
        ([*RL, f"init={imitated[0]}", "policy.prediction=velocity"], "was trained with policy.prediction=action, this"),
        ([*SFT, f"data={demos}", "data_keys.state=observation.stat"], "did you mean observation.state?"),
        (
            [*SFT, f"data={demos}", "data_keys.image=x"],
            "data_keys.image: state, action and images can have",
        ),
    ]
    for words, message in cases:
        outcome = run_train(*words, f"out={out}")
        assert (outcome.code, outcome.stdout) == (2, ""), words
        assert message in outcome.stderr, outcome.stderr
        assert not out.exists()


def test_bounds_of_exploration_are_those_of_a_run_that_explored(
    trained: tuple[Path, Outcome], imitated: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """The network's output is a place between them: with others the same weights would explore otherwise."""
    refused = run_train(*SMALL, f"init={trained[0]}", "policy.max_std=0.5", "total_steps=64", f"out={tmp_path / 'run'}")
    assert refused.code == 2
    assert "was trained with policy.max_std=1.0, this run has 0.5" in refused.stderr
    words = [*RL, f"init={imitated[0]}", "policy.sigma_max=0.5", "total_steps=64", f"out={tmp_path / 'fresh'}"]
    fresh = run_train(*words)
    assert fresh.code == 0, fresh.stderr


def test_actions_in_percent_are_refused_and_learned_from_with_the_options_of_the_message(
    demos: Path, imitated: tuple[Path, Outcome], tmp_path: Path
) -> None:
    data, out = tmp_path / "percent", tmp_path / "run"
    shutil.copytree(demos, data)
    file = data / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(file)
    action = pa.array((100 * np.stack(table["action"].to_numpy())).tolist())
    pq.write_table(table.set_column(table.column_names.index("action"), "action", action), file)
    refused = run_train(*SFT, f"data={data}", f"out={out}")
    assert (refused.code, refused.stdout) == (2, "")
    assert "its action goes beyond -1 to 1, which is all that task reach allows: dx from" in refused.stderr
    assert not out.exists()
    words = shlex.split(refused.stderr.partition(". If so, give ")[2])
    outcome = run_train(*SFT, f"data={data}", f"out={out}", *words)
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["validation_loss"] == pytest.approx(imitated[1].result["validation_loss"], rel=1e-3)
    assert run_eval(f"run={out}", "episodes=2", "num_threads=1").code == 0, "its configuration can be read"


def test_demonstrations_of_larger_steps_than_the_task_has_are_named(demos: Path, tmp_path: Path) -> None:
    words = ["task.control.delta_m=0.03", "algo.updates=1", "eval_episodes=0", f"data={demos}"]
    outcome = run_train(*SFT, *words, f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    line = " ".join(outcome.stderr.split())
    assert "1 is something else in its action than in the task's: dx 0.06 m, not 0.03 m; dy 0.06 m" in line


def test_a_task_that_its_expert_does_not_solve_is_not_demonstrated(tmp_path: Path) -> None:
    words = ["task=reach", "task.success_m=0.000001", "episodes=1", f"out={tmp_path / 'x'}", "num_threads=1"]
    outcome = run_collect(*words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "the expert of reach solved 0 of 20 episodes" in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_a_wrapping_policy_takes_an_imitated_one(imitated: tuple[Path, Outcome], tmp_path: Path) -> None:
    words = [*RL, "policy=dsrl", "policy.noise_hidden=[8]", "total_steps=128"]
    outcome = run_train(*words, f"init={imitated[0]}", f"out={tmp_path / 'rl'}")
    assert outcome.code == 0, outcome.stderr
    source, found = (checkpoint.load_latest(run, only="policy") for run in (imitated[0], tmp_path / "rl"))
    assert source is not None
    assert found is not None
    for key, value in source.state.items():
        assert torch.equal(found.state[f"base.{key}"], value)
    assert run_eval(f"run={tmp_path / 'rl'}", "episodes=2").code == 0
    without = run_train(*words, f"out={tmp_path / 'none'}")
    assert (without.code, without.stdout) == (2, "")
    assert "policy=dsrl needs a policy to wrap: init=<run directory> is missing" in without.stderr


def test_pictures_are_recorded_with_the_demonstrations(tmp_path: Path) -> None:
    words = ("task=reach", "episodes=2", "cameras=[front]", "image_size=16", "num_threads=1", "noise=0.3")
    outcome = run_collect(*words, f"out={tmp_path / 'set'}")
    assert outcome.code == 0, outcome.stderr
    table = pq.read_table(tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet")
    pictures = [row["bytes"] for row in table["observation.images.front"].to_pylist()]
    assert len(pictures) == outcome.result["frames"]
    assert len(set(pictures)) > len(pictures) // 2  # the arm moves
