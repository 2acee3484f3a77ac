"""The replay command: the episodes of an evaluation, made again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embodied import replay
from embodied.runtime import checkpoint
from embodied.session.results import filming
from tests.commands.helpers import Outcome, run, run_eval


@pytest.fixture
def evaluated(trained: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """The result of 6 episodes of a copy of a run."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained[0], run_dir, symlinks=True)
    assert run_eval(f"run={run_dir}", "episodes=6", "seed=3", "noise=seeded", "device=cpu").code == 0
    (path,) = run_dir.glob("eval/*_seed3_seeded_episodes6.json")
    return path


def run_replay(*words: object) -> Outcome:
    return run(replay.main, [*map(str, words), "device=cpu", "num_threads=1"])


def edit(path: Path, line: int, **values: object) -> None:
    """Change the record of an episode."""
    path = path.with_suffix(".episodes.jsonl")
    rows = path.read_text().splitlines()
    rows[line] = json.dumps(json.loads(rows[line]) | values)
    path.write_text("\n".join(rows) + "\n")


def test_an_evaluation_repeats_and_so_does_each_of_its_episodes(evaluated: Path) -> None:
    again = run_replay(evaluated)
    assert again.code == 0, again.stderr
    assert (again.result["episodes"], again.result["differing"]) == (6, [])
    assert again.result["made_with"] == again.result["replayed_with"]
    for episode in (0, 4):
        one = run_replay(f"eval={evaluated}", f"episode={episode}")
        assert (one.code, one.result["episodes"]) == (0, 1), one.stderr


def test_the_final_evaluation_of_a_training_repeats(trained: tuple[Path, Outcome]) -> None:
    (path,) = trained[0].glob("eval/final_*.json")
    again = run_replay(path)
    assert (again.code, again.result["episodes"]) == (0, 4), again.stderr


def test_what_differs_is_named(evaluated: Path) -> None:
    edit(evaluated, 2, success_at_end=True)
    edit(evaluated, 5, actions="0")
    again = run_replay(evaluated)
    assert (again.code, again.result["outcomes_differing"]) == (1, 1)
    outcome, actions = again.result["differing"]
    assert (outcome["episode"], outcome["was"], outcome["is"]) == (
        2,
        {"success_at_end": True},
        {"success_at_end": False},
    )
    assert (actions["episode"], list(actions["was"])) == (5, ["actions"])
    assert [run_replay(evaluated, f"episode={i}").code for i in (1, 5)] == [0, 1]


def test_a_checkpoint_that_has_changed_is_refused(evaluated: Path) -> None:
    run_dir = evaluated.parents[1]
    found = checkpoint.load_latest(run_dir)
    assert found is not None
    found.state["policy"]["actor.2.bias"][0] *= 1.001
    checkpoint.save(run_dir, found.env_steps, found.state)
    refused = run_replay(evaluated)
    assert refused.code == 2
    assert "has changed since the evaluation: its policy has SHA-256" in refused.stderr
    shutil.rmtree(found.path)
    gone = run_replay(evaluated)
    assert (gone.code, gone.stderr.count("\n")) == (2, 1)
    assert f"which {run_dir} no longer has" in gone.stderr


def test_a_file_without_episodes_is_refused(evaluated: Path, tmp_path: Path) -> None:
    assert "is not the result of an evaluation" in run_replay(tmp_path / "nothing.json").stderr
    assert "episode: got 6, allowed: 0 to 5" in run_replay(evaluated, "episode=6").stderr
    records = evaluated.with_suffix(".episodes.jsonl")
    for text in ("{}\n" * 6, records.read_text().partition("\n")[0]):
        records.write_text(text)
        assert "is of 6 episodes, " in run_replay(evaluated).stderr
    records.unlink()
    refused = run_replay(evaluated)
    assert refused.code == 2
    assert "has no episodes beside it" in refused.stderr


def test_one_episode_is_filmed(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filming, "SIZE", (64, 48))
    filmed = run_replay(evaluated, "episode=4", "video=true")
    assert filmed.code == 0, filmed.stderr
    assert Path(filmed.result["video"]).is_file()
