"""The flow policy's bundle, as it is and as a copy to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embodied.deployment.bundle.runner import PolicyRunner
from tests.deployment.exports import flow_bundle


@pytest.fixture(scope="module")
def runner() -> PolicyRunner:
    return PolicyRunner(flow_bundle())


@pytest.fixture
def bundle_dir(tmp_path: Path) -> Path:
    """A copy of the flow policy's bundle."""
    return Path(shutil.copytree(flow_bundle(), tmp_path / "bundle"))
