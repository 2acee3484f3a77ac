"""Checkpoints: what is saved comes back, the newest valid one wins, old ones go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.errors import UserError
from embodied.runtime import checkpoint


class Payload:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def make_state(value: float) -> dict[str, Any]:
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    return {
        "policy": {"weight": torch.full((4, 3), value), "count": torch.tensor(7)},
        "algorithm": {"optimizer": optimizer, "generator": torch.Generator().get_state()},
        "runtime": {"counters": {"iteration": 2, "env_steps": 100}, "groups": [{"obs": {"state": torch.ones(2)}}]},
    }


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 100, make_state(1.5))
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert (found.path, found.env_steps) == (path, 100)
    assert torch.equal(found.state["policy"]["weight"], torch.full((4, 3), 1.5))
    assert found.state["algorithm"]["optimizer"]["param_groups"] == [{"lr": 1e-3, "params": [0]}]
    assert list(found.state["algorithm"]["optimizer"]["state"]) == [0]
    assert found.state["runtime"]["counters"] == {"iteration": 2, "env_steps": 100}
    assert (tmp_path / "checkpoints" / "last").resolve() == path.resolve()


def test_only_one_part(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 100, make_state(1.5))
    (tmp_path / "checkpoints/last/runtime.pt").write_bytes(b"broken, but not asked for")
    found = checkpoint.load_latest(tmp_path, only="policy")
    assert found is not None
    assert torch.equal(found.state["weight"], torch.full((4, 3), 1.5))
    with pytest.raises(UserError, match="no 'critic'"):
        checkpoint.load_latest(tmp_path, only="critic")


def test_none_where_nothing_was_saved(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "no_such_run") is None


def test_keeps_the_newest_in_order_of_steps(tmp_path: Path) -> None:
    for env_steps in (9, 100, 20_000, 3_000_000):
        checkpoint.save(tmp_path, env_steps, make_state(env_steps), keep=3)
    assert steps(tmp_path) == ["last", "step_100", "step_20000", "step_3000000"]
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.env_steps == 3_000_000


def test_same_step_again_replaces(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path, 5, make_state(value))
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert float(found.state["policy"]["weight"][0, 0]) == 2.0
    assert steps(tmp_path) == ["last", "step_5"]


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """Even with a manifest that fits: weights_only refuses anything but tensors and plain values."""

    checkpoint.save(tmp_path, 1, {"policy": Payload(tmp_path / "owned")})
    with pytest.raises(UserError, match="corrupt"):
        checkpoint.load_latest(tmp_path)
    assert not (tmp_path / "owned").exists()
