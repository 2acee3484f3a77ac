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
    solved = json.loads(evaluated.read_text())["success_at_end"]
    assert (
        f"6 episodes and the figures are the same, action by action; {6 * solved:.0f} of 6 end with success"
        in again.stderr
    )
    for episode in (0, 4):
        one = run_replay(f"eval={evaluated}", f"episode={episode}")
        assert (one.code, one.result["episodes"]) == (0, 1), one.stderr
        how = {1.0: "with", 0.0: "without"}[one.result["success_at_end"]]
        assert f"1 episode is the same, action by action, {how} success at its end; " in one.stderr
        assert f"{6 * solved:.0f} of 6 end with success" in one.stderr


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["success_at_end"], []), (["success_at_end"], ["episode=1"]), (["return_mean"], []),
        (["success_at_end_ci95"], []), (["success_once"], []), (["episode_length_mean"], []),
        (["other_noise", "success_at_end"], []),
    ],
)  # fmt: skip
def test_a_figure_that_its_episodes_do_not_give_is_named(
    trained: tuple[Path, Outcome], tmp_path: Path, keys: list[str], words: list[str]
) -> None:
    run_dir = shutil.copytree(trained[0], tmp_path / "run", symlinks=True)
    (path,) = run_dir.glob("eval/final_*.json")
    result = json.loads(path.read_text())
    where = result["other_noise"] if len(keys) > 1 else result
    real, where[keys[-1]] = where[keys[-1]], 0.1234
    path.write_text(json.dumps(result))
    again = run_replay(path, *words)
    assert again.code == 1
    assert again.result["figures_differing"] == {".".join(keys): {"was": 0.1234, "is": real}}
    assert f"{'.'.join(keys)}: the file says 0.1234, its episodes give {real}" in again.stderr


def test_the_final_evaluation_of_a_training_repeats(trained: tuple[Path, Outcome]) -> None:
    (path,) = trained[0].glob("eval/final_*.json")
    again = run_replay(path)
    assert (again.code, again.result["episodes"]) == (0, 4), again.stderr


def test_what_differs_is_named(evaluated: Path) -> None:
    edit(evaluated, 5, actions="0")
    assert [run_replay(evaluated, f"episode={i}").code for i in (1, 5)] == [0, 1]
    edit(evaluated, 2, success_at_end=True)
    again = run_replay(evaluated)
    assert (again.code, again.result["outcomes_differing"]) == (1, 1)
    outcome, actions = again.result["differing"]
    assert (outcome["episode"], outcome["was"], outcome["is"]) == (
        2,
        {"success_at_end": True},
        {"success_at_end": False},
    )
    assert (actions["episode"], list(actions["was"])) == (5, ["actions"])


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
    assert "nothing.json does not exist" in run_replay(tmp_path / "nothing.json").stderr
    (tmp_path / "other.json").write_text("[]")
    assert "is not the result of an evaluation" in run_replay(tmp_path / "other.json").stderr
    assert "episode: got 6, allowed: 0 to 5" in run_replay(evaluated, "episode=6").stderr
    records = evaluated.with_suffix(".episodes.jsonl")
    whole = records.read_text()
    for text, number in {"{}\n" * 6: 0, whole.partition("\n")[0]: 1, whole[:-30]: 5, whole + whole: 12}.items():
        records.write_text(text)
        cut = run_replay(evaluated)
        assert f"is of 6 episodes, {records.name} has {number} whole records: one was cut off or changed" in cut.stderr
        assert (cut.code, cut.stderr.count("\n")) == (2, 1)
    records.unlink()
    refused = run_replay(evaluated)
    assert refused.code == 2
    assert "has no episodes beside it" in refused.stderr


def test_one_episode_is_filmed(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filming, "SIZE", (64, 48))
    monkeypatch.chdir(evaluated.parents[2])
    filmed = run_replay(evaluated.relative_to(Path.cwd()), "episode=4", "video=true")
    assert filmed.code == 0, filmed.stderr
    assert Path(filmed.result["video"]).is_file()
    assert filmed.result["video"].startswith("run/videos/")
