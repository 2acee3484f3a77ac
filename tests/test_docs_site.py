"""The site of the documents builds without a warning, leads from pages to sources, and loads nothing from a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    subprocess.run(build, cwd=root, check=True)
    return out


def test_a_page_leads_to_the_module_that_it_names(site: Path) -> None:
    assert 'href="../api/embodied.session.defaults/"' in (site / "defaults/index.html").read_text(encoding="utf-8")
    module = (site / "api/embodied.session.defaults/index.html").read_text(encoding="utf-8")
    assert "Return nested settings of PPO for a task" in module


def test_every_public_module_and_page_is_in_the_site(site: Path, root: Path) -> None:
    pages = [path.relative_to(root / "docs").with_suffix("") for path in (root / "docs").rglob("*.md")]
    missing = [page for page in pages if not (site / (page.parent if page.name == "README" else page)).is_dir()]
    assert not missing
    assert (site / "api/embodied.envs.mujoco.pool/index.html").is_file()


def test_the_site_loads_nothing_from_a_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(?:https?:)?//")
    assert not [page for page in site.rglob("*.html") if loads.search(page.read_text(encoding="utf-8"))]
