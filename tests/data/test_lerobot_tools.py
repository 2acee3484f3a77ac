"""LeRobot 0.4.4's own code on our data sets, and our reader on its: delete, split, merge, record.

LeRobot wants an older torch than ours, so it has an environment of its own, which ``make test`` creates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.spec import EnvSpec
from embodied.data import Episode, read, write
from embodied.data.lerobot_writer import QUANTILES

pytestmark = pytest.mark.slow(reason="LeRobot's imports, and its encoding of videos")

HERE = Path(__file__).parent / "lerobot_tools"
STATE, ACTION, FRONT = "observation.state", "action", "observation.images.front"
LENGTHS = (5, 8, 6)
KEPT = {"ours": (0, 1, 2), "deleted": (0, 2), "train": (0, 2), "val": (1,), "merged": (0, 2, 1)}
"""Episodes of ours in each data set that LeRobot makes, in order."""


@dataclass(frozen=True)
class Outcome:
    episodes: list[Episode]
    ours: Path
    made: Path

    def stats(self, name: str) -> dict[str, dict[str, list[float]]]:
        return json.loads((self.made / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A data set of ours, and what LeRobot makes of it."""
    environment = Path(sys.prefix) / "lerobot"
    if not (environment / ".installed").exists():
        pytest.skip(
            f"LeRobot 0.4.4 is not installed in {environment}: make VENV={sys.prefix} {environment / '.installed'}"
        )
    generator = torch.Generator().manual_seed(0)
    episodes = []
    for i, length in enumerate(LENGTHS):
        state = torch.randn(length, 3, generator=generator)
        state[:, 2] = 0.1  # constant
        picture = torch.randint(0, 200, (length, 16, 24, 3), generator=generator, dtype=torch.uint8)
        done = torch.arange(length) == length - 1
        action = torch.rand(length, 1, generator=generator)
        episodes.append(
            Episode(state, action, torch.ones(length), done, ("do it", "do that")[i % 2], {"front": picture})
        )
    folder = tmp_path_factory.mktemp("lerobot")
    write(folder / "ours", episodes, EnvSpec.of_sizes("test", state=3, action=1))
    (folder / "made").mkdir()
    variables = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    variables.pop("PYTHONPATH", None)
    command = [environment / "bin" / "python", HERE / "run.py", folder / "ours", folder / "made"]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Outcome(episodes, folder / "ours", folder / "made")


def values(episode: Episode, key: str) -> np.ndarray:
    """Numbers of one feature of an episode, [n, D], with pixels in [0, 1]."""
    if key == FRONT:
        return episode.images["front"].reshape(-1, 3).double().numpy() / 255
    return (episode.state_LS if key == STATE else episode.action_LA).double().numpy()


@pytest.mark.parametrize("name", KEPT)
def test_lerobot_loads_frames_as_they_were_recorded(outcome: Outcome, name: str) -> None:
    kept = [outcome.episodes[i] for i in KEPT[name]]
    found = np.load(outcome.made / f"{name}.npz")
    np.testing.assert_array_equal(found["state"], torch.cat([e.state_LS for e in kept]))
    np.testing.assert_array_equal(found["action"], torch.cat([e.action_LA for e in kept]))
    np.testing.assert_array_equal(found["images"], torch.cat([e.images["front"] for e in kept]))
    np.testing.assert_array_equal(found["episode"], np.repeat(np.arange(len(kept)), [len(e) for e in kept]))
    assert found["task"].tolist() == [e.instruction for e in kept for _ in range(len(e))]


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("key", [STATE, ACTION, FRONT])
def test_statistics_that_lerobot_has(outcome: Outcome, name: str, key: str) -> None:
    """It takes quantiles of several episodes as their average, weighted by frames; those of one set are ours."""
    kept = [outcome.episodes[i] for i in KEPT[name]]
    stats = outcome.stats(name)
    assert set(stats) == set(json.loads((outcome.ours / "meta" / "info.json").read_text())["features"])
    rows, found = np.concatenate([values(episode, key) for episode in kept]), stats[key]
    shape = (3, 1, 1) if key == FRONT else (rows.shape[1],)
    assert set(found) == {"min", "max", "mean", "std", "count", *QUANTILES}
    assert found["count"] == [sum(map(len, kept))]
    for statistic in ("min", "max", "mean", "std"):
        wanted = getattr(rows, statistic)(0).reshape(shape)
        np.testing.assert_allclose(found[statistic], wanted, rtol=1e-9, atol=1e-9, err_msg=statistic)
    for quantile, share in QUANTILES.items():
        each = [np.quantile(values(episode, key), share, axis=0) for episode in kept]
        average = np.average(each, axis=0, weights=[len(episode) for episode in kept])
        wanted = np.quantile(rows, share, axis=0) if name == "ours" else average
        np.testing.assert_allclose(found[quantile], wanted.reshape(shape), rtol=1e-9, atol=1e-9, err_msg=quantile)


def test_a_constant_entry_has_equal_quantiles(outcome: Outcome) -> None:
    """LeRobot's normaliser replaces a divisor that is exactly 0, so rounding must not make one."""
    for name in KEPT:
        found = outcome.stats(name)[STATE]
        assert found["q01"][2] == found["q10"][2] == found["q90"][2] == found["q99"][2]
        assert found["min"][2] == found["max"][2]


def test_datasets_decodes_pictures_untold(outcome: Outcome) -> None:
    found = np.load(outcome.made / "untold.npz")["images"]
    np.testing.assert_array_equal(found, torch.cat([e.images["front"] for e in outcome.episodes]))


@pytest.mark.parametrize("name", ["deleted", "train", "val", "merged"])
def test_we_read_what_lerobot_makes(outcome: Outcome, name: str) -> None:
    kept = [outcome.episodes[i] for i in KEPT[name]]
    data = read(outcome.made / name, cameras=["front"])
    assert torch.equal(data.state_FS, torch.cat([e.state_LS for e in kept]))
    assert torch.equal(data.action_FA, torch.cat([e.action_LA for e in kept]))
    assert torch.equal(data.images["front"], torch.cat([e.images["front"] for e in kept]))
    assert [data.instructions[i] for i in data.instruction_F] == [e.instruction for e in kept for _ in range(len(e))]


@pytest.mark.parametrize(("name", "episodes"), [("recorded", (0, 1, 2)), ("recorded_deleted", (0, 2))])
def test_we_read_videos_that_lerobot_records(outcome: Outcome, name: str, episodes: tuple[int, ...]) -> None:
    data = read(outcome.made / name, cameras=["front"])
    frames = [sum(LENGTHS[:episode]) + frame for episode in episodes for frame in range(LENGTHS[episode])]
    assert data.state_FS[:, 0].tolist() == frames
    wanted = 10 + 12 * torch.tensor(frames)
    assert data.images["front"].shape == (len(frames), 64, 64, 3)
    assert (data.images["front"].double().mean((1, 2, 3)) - wanted).abs().max() < 6, "frames differ by 12"
