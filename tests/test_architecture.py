"""The rooms of docs/architecture.md, held by tests."""

from __future__ import annotations

import ast
import glob
import os
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from mypy.find_sources import create_source_list
from mypy.options import Options

ROOMS = ("envs", "policies", "algos")
LINKS = (*ROOMS, "configs", "assets")


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its name. glob follows the links in embodied/, Path.rglob does not."""
    paths = [Path(path) for path in glob.glob("embodied/**/*.py", root_dir=root, recursive=True)]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


def loaded_modules(statement: str, root: Path) -> set[str]:
    """Names in sys.modules after running ``statement`` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def rooms_of(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("embodied.")} & set(ROOMS)


def test_embodied_has_all_rooms_and_all_data(root: Path) -> None:
    behind = {path.relative_to(root) for room in ROOMS for path in (root / room).rglob("*.py")}
    assert {Path("embodied") / path for path in behind} < set(modules(root).values())
    for name in LINKS:
        assert (root / "embodied" / name).samefile(root / name)
        assert not Path(os.readlink(root / "embodied" / name)).is_absolute()


def test_lint_and_types_read_every_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    graph = grimp.build_graph(*settings["importlinter"]["root_packages"], cache_dir=None)
    assert graph.modules == set(modules(root))

    options = Options()
    options.namespace_packages = options.explicit_package_bases = True
    typed = create_source_list(settings["mypy"]["files"], options)
    plugins = {".".join(path.relative_to(root).with_suffix("").parts) for path in root.glob("plugins/*/*.py")}
    assert {source.module for source in typed} == set(modules(root)) | plugins


def test_no_files_import_each_other_in_a_circle(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports for types alone count too: a reader follows them all the same."""
    monkeypatch.chdir(root)
    graph = grimp.build_graph("embodied", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names a circle


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_import_rules_hold(root: Path) -> None:
    done = lint_imports(root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.fixture(scope="module")
def hollow(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the modules without their contents, in which nothing is violated."""
    copy = tmp_path_factory.mktemp("hollow")
    for module in modules(root).values():
        (copy / module).parent.mkdir(parents=True, exist_ok=True)
        (copy / module).touch()
    (copy / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    clean = lint_imports(copy)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    return copy


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("embodied.policies.base", "embodied.envs"),
        ("embodied.core.types", "embodied.runtime"),
        ("embodied.deployment.bundle.write", "embodied.policies"),
        ("embodied.session.session", "embodied.trainers"),
        ("embodied.session.session", "embodied.session.results"),
        ("embodied.runtime.learner", "mujoco"),
        ("embodied.envs.rendering.vision", "embodied.envs.mujoco"),
        ("embodied.envs.tasks.lift", "embodied.envs.mujoco.robots.panda"),
        ("embodied.policies.config", "torch"),
    ],
)
def test_import_rules_notice_a_violation(hollow: Path, importer: str, imported: str) -> None:
    bad = hollow.joinpath(*importer.split(".")).with_suffix(".py")
    assert bad.is_file()
    bad.write_text(f"import {imported}\n")
    broken = lint_imports(hollow)
    bad.write_text("")
    assert broken.returncode == 1
    assert f"is not allowed to import {imported}" in broken.stdout
    assert importer in broken.stdout


def test_core_imports_nothing_of_ours(root: Path) -> None:
    loaded = loaded_modules("import embodied.core.algorithm, embodied.core.env, embodied.core.registry", root)
    assert rooms_of(loaded) == set()
    ours = {name for name in loaded if name.startswith("embodied.")}
    assert all(name == "embodied.core" or name.startswith("embodied.core.") for name in ours), ours


@pytest.mark.parametrize("room", ["policies", "algos", "runtime"])
def test_room_needs_no_simulator(root: Path, room: str) -> None:
    """Policies and algorithms can be used, and the runtime started, where no simulator is installed."""
    everything = (
        f"import importlib, pkgutil, embodied.{room} as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    if importlib.util.find_spec('ray') or not module.name.startswith('embodied.runtime.ray.'):\n"
        "        importlib.import_module(module.name)"
    )
    loaded = loaded_modules(everything, root)
    assert not loaded & {"mujoco", "gymnasium", "envpool"}
    assert rooms_of(loaded) <= {room}


def test_data_is_where_the_code_looks_for_it(root: Path) -> None:
    """configs/ and assets/ hold data only: no module that an installed wheel would put on sys.path."""
    for folder in ("configs", "assets"):
        assert not list((root / folder).rglob("*.py")), f"{folder}/ is data only"
    assert list((root / "configs").rglob("*.yaml"))
    assert list((root / "assets").rglob("*.xml"))


def test_files_that_pages_and_settings_name_are_there(root: Path) -> None:
    """Except in docs/extending, whose pages add files, and a user's example of a setting."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/*.md"), *root.glob("configs/**/*.yaml")]
    pattern = re.compile(r"\b(?:embodied|envs|policies|algos|tests|configs)/[\w/-]+\.(?:py|yaml)\b")
    missing = {
        f"{page.relative_to(root)}: {name}"
        for page in pages
        for name in pattern.findall(page.read_text(encoding="utf-8"))
        if not (root / name).exists()
    }
    assert missing == {"docs/environments.md: configs/sim/rough.yaml"}


def test_text_is_read_and_written_as_utf8_in_every_locale(root: Path) -> None:
    """Without ``encoding=``, Python takes the encoding of the machine's locale."""
    forgotten = []
    for path in [*(root / path for path in modules(root).values()), *(root / "docs").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and not any(word.arg == "encoding" for word in call.keywords):
                function, words = ast.unparse(call.func), [word for word in call.args if isinstance(word, ast.Constant)]
                binary = ("os.open", "Image.open", "archive.open")
                opens = function.rpartition(".")[2] == "open" and function not in binary
                opens_text = opens and not any("b" in str(word.value) for word in words)
                if opens_text or function.endswith(("read_text", "write_text", "FileHandler")):
                    forgotten.append(f"{path.relative_to(root)}, line {call.lineno}: {ast.unparse(call)}")
    assert not forgotten, "\n".join(forgotten)
