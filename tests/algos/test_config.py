"""configs/algo holds only what differs from the dataclasses."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from embodied.algos import ALGORITHMS
from embodied.core.options import from_mapping


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_yaml_lists_only_what_differs_from_the_dataclass(name: str, root: Path) -> None:
    options = OmegaConf.to_container(OmegaConf.load(root / "configs" / "algo" / f"{name}.yaml"))
    assert isinstance(options, dict)
    assert options.pop("name") == name
    config = ALGORITHMS[name].config
    made, defaults = from_mapping(config, options, "algo"), config()
    assert [key for key in options if getattr(made, key) == getattr(defaults, key)] == []
