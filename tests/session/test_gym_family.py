"""Runs on environments of gymnasium: training, evaluation, resume, video, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied import eval as eval_command
from embodied import tasks, train
from embodied.session.config import compose_run
from embodied.session.factories import make_spec
from embodied.session.session import new_run_dir
from tests.commands.helpers import Outcome, run

TOY = "tests.envs.toy_gym"
FOREIGN = "tests.envs.toy_foreign"
SMALL = [
    "num_envs=8", "runtime=sync", "runtime.decisions=4", "runtime.eval_every=1", "runtime.eval_episodes=2",
    "eval_episodes=4", "device=cpu", "policy.actor_hidden=[8]", "policy.critic_hidden=[8]", "total_steps=64",
    "algo.epochs=1", "algo.num_minibatches=1",
    "runtime.sim_threads=1", "runtime.actor_threads=1", "runtime.learner_threads=1",
]  # fmt: skip


def trained(out: Path, *words: str) -> Outcome:
    outcome = run(train.main, [*SMALL, f"out={out}", *words])
    assert outcome.code == 0, outcome.stderr
    return outcome


def test_returns_are_reported_where_there_is_no_success_and_videos_show_the_environment(tmp_path: Path) -> None:
    out = tmp_path / "run"
    outcome = trained(out, "task=gym/CartPole-v1", "policy=categorical", "task.max_episode_steps=12")
    assert outcome.result["eval"]["return_mean"] > 5
    assert "success_at_end" not in outcome.result["eval"]
    resumed = run(train.main, [f"resume={out}", "total_steps=128"])
    assert resumed.code == 0, resumed.stderr
    assert resumed.result["env_steps"] >= 128
    words = [f"run={out}", "episodes=3"]
    filmed, again = (run(eval_command.main, [*words, f"video={video}"]) for video in ("true", "false"))
    assert filmed.code == 0, filmed.stderr
    result = filmed.result
    assert Path(result.pop("video")).stat().st_size > 0
    assert result == again.result


@pytest.mark.parametrize(
    "words",
    [
        ["task=gym/Pendulum-v1", "policy=flow", "task.max_episode_steps=20"],
        [f"task=gym/{TOY}:Ending-v0", "policy=gaussian", "sim.processes=1"],
        [f"task=gym/{TOY}:Masked-v0", "policy=categorical"],
    ],
    ids=lambda words: words[1],
)
def test_policies_learn_on_the_spaces_that_they_are_for(tmp_path: Path, words: list[str]) -> None:
    assert trained(tmp_path / "run", *words).result["eval"]["episodes"] == 4


def test_choices_are_learned_from_images(tmp_path: Path) -> None:
    words = ["policy.cameras=[observation]", "policy.image_size=36", "policy.grey=true", "num_envs=16"]
    length = ["runtime.decisions=16", "total_steps=4000", "eval_episodes=20"]
    length += ["algo.schedule=fixed", "algo.gamma=0.5", "algo.epochs=4", "algo.num_minibatches=4"]
    sides = f"task=gym/{TOY}:Sides-v0"
    result = trained(tmp_path / "run", sides, "policy=categorical", *words, *length).result
    assert result["eval"]["return_mean"] > 11  # of 12; chance is 6


@pytest.mark.slow(reason="builds vla_tiny")
def test_policies_that_see_get_images(tmp_path: Path) -> None:
    words = [f"task=gym/{TOY}:Nested-v0", "policy=vla_tiny", "policy.cameras=[front,render]", "policy.image_size=16"]
    small = [word for word in SMALL if "actor_hidden" not in word and "eval" not in word]
    smaller = ["num_envs=2", "total_steps=16", "runtime.decisions=2", "runtime.eval_every=0", "eval_episodes=0"]
    outcome = run(train.main, [*small, *words, *smaller, f"out={tmp_path / 'run'}", "task.instruction=count"])
    assert outcome.code == 0, outcome.stderr


BAD = {
    "task=gym/CartPol-v1": "Did you mean 'CartPole-v1'",
    "task=gym/ALE/Pong-v5": "pip install ale-py",
    f"task=gym/{TOY}:Words-v0": "its observation 'observation' is a Text",
    f"task=gym/{TOY}:Toy-v0 task.kwargs.mass=2": "unexpected keyword argument 'mass'",
    "task=gym/CartPole-v1 policy=gaussian": "task gym/CartPole-v1 needs choices between discrete actions",
    "task=gym/CartPole-v1 policy=vla_tiny": "unknown camera of task gym/CartPole-v1 'front'",
    "task=gym/CartPole-v1 policy=categorical sim.threads=2": "unknown key 'sim.threads'",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_clear_line(tmp_path: Path, words: str) -> None:
    outcome = run(train.main, [*words.split(), f"out={tmp_path / 'run'}"])
    assert outcome.code == 2
    assert BAD[words] in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_a_broken_environment_ends_the_run_with_its_step_and_seed(tmp_path: Path) -> None:
    words = [f"task=gym/{TOY}:Raising-v0", "policy=gaussian", f"out={tmp_path / 'run'}"]
    outcome = run(train.main, [*SMALL, *words])
    assert outcome.code == 2
    assert "raised RuntimeError in toy_gym.py, line " in outcome.stderr.splitlines()[-1]
    assert ": the simulator is broken (control step 8 of" in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr


def test_the_check_names_what_fails() -> None:
    outcome = run(tasks.main, [f"check=gym/{TOY}:Raising-v0", "resets=20"])
    assert outcome.code == 2
    assert not outcome.result["passed"]
    checks = outcome.result["checks"]
    assert "is broken (control step 8" in checks["spaces"]["why"]
    assert "spaces         failed: task gym/" in outcome.stderr
    assert {check["passed"] for name, check in checks.items() if name != "spaces"} == {None}
    assert {check["why"] for name, check in checks.items() if name != "spaces"} == {"not reached: see spaces"}
    assert "Traceback" not in outcome.stderr
    unreached, last = outcome.stderr.splitlines()[-2:]
    assert unreached.startswith("not reached: dtypes, bad_actions, ")
    assert last == f"error: task gym/{TOY}:Raising-v0 does not pass: spaces failed"
    assert run(tasks.main, ["check=gym/CartPol-v1"]).code == 2


def test_the_check_names_the_cure_of_an_environment_that_is_bound_to_its_thread() -> None:
    words = [f"check=gym/{FOREIGN}:Database-v0", "resets=20"]
    outcome = run(tasks.main, words)
    assert outcome.code == 2
    assert "; sim.processes=1 builds and steps it" in outcome.result["checks"]["spaces"]["why"]
    assert run(tasks.main, [*words, "sim.processes=1"]).result["passed"]


def test_the_check_of_an_environment_that_hangs_ends_in_the_stated_time() -> None:
    outcome = run(tasks.main, [f"check=gym/{TOY}:Hanging-v0", "max_minutes=0.02"])
    assert outcome.code == 2
    assert "not finished: 0.02 minutes (max_minutes=) are over" in outcome.result["checks"]["spaces"]["why"]


def test_the_check_names_what_the_environment_lacks_and_where() -> None:
    outcome = run(tasks.main, [f"check=gym/{FOREIGN}:Unshown-v0", "resets=20"])
    why = outcome.result["checks"]["rendering"]["why"]
    assert f"of {FOREIGN}.Unshown has no render(), although its metadata name the render mode rgb_array" in why


@pytest.mark.parametrize("words", [["runtime=sync"], ["runtime=local"]])
def test_a_run_that_its_environment_ends_is_told_from_a_finished_one(tmp_path: Path, words: list[str]) -> None:
    task = [f"task=gym/{FOREIGN}:Leaving-v0", "policy=gaussian", *words, f"out={tmp_path / 'run'}"]
    outcome = run(train.main, [word for word in SMALL if "runtime=" not in word] + task)
    assert outcome.code == 2
    assert "raised SystemExit in toy_foreign.py" in outcome.stderr.splitlines()[-1]


def test_the_directory_of_a_run_has_no_colon() -> None:
    config = compose_run({"task": f"gym/{TOY}:Toy-v0", "policy": "gaussian"})
    assert new_run_dir(config).parent == Path("runs/gym") / f"{TOY}.Toy-v0"


def test_an_unknown_option_of_the_check_is_named() -> None:
    outcome = run(tasks.main, ["check=reach", "reset=3"])
    assert outcome.code == 2
    assert "unknown key 'reset'. Did you mean 'resets'? Allowed: " in outcome.stderr
    assert "steps" in outcome.stderr


def test_a_success_key_that_no_info_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(compose_run({"task": f"gym/{TOY}:Ending-v0", "task.success_key": "solved"}))
    assert spec.has_success
    assert "no info of its first 5 steps has 'solved'; they have: " in caplog.text
