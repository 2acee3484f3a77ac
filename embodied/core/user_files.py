"""Files that users name: the nearest name for a missing one, files that have moved, and Python files to import.

    the command line, task=my_task.py:MyTask ──► name_words ──┐
    section ``task`` of a run or a bundle ──► recorded ───────┴─► named ──► checked ──► load

Only a file that the command line names is imported, or one that still has the path and the hash that a run recorded. So
a run or a bundle of a stranger brings no code. A module is called ``embodied.core.user_files.<path>``, and other
processes find it by that name when they unpickle.
"""

import hashlib
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from urllib.parse import quote, unquote

from embodied.core.errors import UserError, describe_error, unknown_name

__path__: list[str] = []  # a package, whose modules are the files
REFERENCE = re.compile(r"(.+\.py)(?::(\w*))?")
MODULE = re.compile(r"\w+/(\w+)[\w.]*:")
_named: set[Path] = set()  # files that may be imported
_places: dict[str, Path] = {}  # where the files are that a section ``task`` names as ``robot`` and ``scene``


def find_file(kind: str, name: str) -> Path:
    """Return the absolute path of a file. UserError with the nearest name in its folder if there is none."""
    path = Path(name).resolve()
    if not path.is_file():
        near = [str(Path(name).parent / other.name) for other in path.parent.glob(f"*{path.suffix}")]
        raise unknown_name(kind, name, near) if near else UserError(f"{kind} {name}: there is none")
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reference(name: object) -> tuple[Path, str] | None:
    """Return the file and the class of a name like ``my_task.py:MyTask``; None for any other name."""
    match = REFERENCE.fullmatch(name) if isinstance(name, str) else None
    return (Path(match[1]), match[2] or "") if match else None


def short_name(name: str) -> str:
    """Return a name for people: ``/home/me/my_task.py:MyTask`` → ``my_task:MyTask``, any other name as it is."""
    return f"{found[0].stem}:{found[1]}" if (found := reference(name)) else name


def absolute(name: str) -> str:
    """Return a reference with the absolute path of its file, any other name as it is. UserError if there is no file."""
    return f"{find_file('file', str(found[0]))}:{found[1]}" if (found := reference(name)) else name


def name_words(words: Sequence[str]) -> list[str]:
    """Let the files be imported that the words of a command line name; return the words without ``task_file=``.

    Note where robot and scene of a run are now: ``robot_file=`` and ``scene_file=``, which are left out too.
    """
    _places.clear()
    keys = {"task_file": "", "robot_file": "robot", "scene_file": "scene"}
    for key, _, value in (word.partition("=") for word in words):
        value = value.strip("\"'")
        if key == "task_file":
            _named.add(find_file("file", value))
        elif key in keys:
            _places[keys[key]] = find_file(f"{keys[key]} file", value)
        elif key in ("task", "check") and (found := reference(value)):
            _named.add(find_file("file", str(found[0])))
    return [word for word in words if word.partition("=")[0] not in keys]


def refuse_places() -> None:
    """Raise UserError for ``robot_file=`` and ``scene_file=`` where nothing is read that names such a file."""
    for part in _places:
        raise UserError(
            f"{part}_file= says where the file of a run, bundle or data set is now; here: task.{part}=<path>"
        )


def present(section: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the section ``task`` of a run, bundle or data set in ``folder``, with the files that were named instead.

    UserError if a file is missing. Whether it is the recorded one is checked where it is read.
    """

    def place(part: str, name: object) -> object:
        if not isinstance(name, str) or not Path(name).suffix:  # a robot of ours, or no scene
            return name
        if not (path := _places.get(part, Path(name))).is_file():
            cure = f"say where it is now: {part}_file=<path>"
            raise UserError(f"'{folder}': the file of its {part}, {path}, is missing: {cure}")
        return str(path)

    found = {**section, **{part: place(part, section[part]) for part in ("robot", "scene") if part in section}}
    if isinstance(robots := section.get("robots"), Mapping):
        found["robots"] = {side: place("robot", name) for side, name in robots.items()}
    return found


def recorded(section: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the section ``task`` of a run or bundle in ``folder``; if its name is a reference, with a file to import.

    That is the recorded one, if it did not come in the folder, or one that was named, with the recorded hash. UserError
    if there is neither, or if the module of a name like ``gym/my_module:MyEnv-v0`` came in the folder.
    """
    if (found := reference(section["name"])) is None:
        if module := MODULE.match(section["name"]):
            spec = PathFinder.find_spec(module[1])
            places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
            if any(_came_in(folder, Path(place)) for place in places if place):
                why = f"the module {module[1]} of its task came with it"
                raise UserError(f"'{folder}': {why}: work in another folder, with one that you trust on PYTHONPATH")
        return dict(section)
    path, came_along = found[0], not found[0].is_absolute() or _came_in(folder, found[0])
    for file in (*(() if came_along else (path,)), *_named):
        if file.is_file() and sha256(file) == section.get("task_sha256"):
            _named.add(file)
            return {**section, "name": f"{file}:{found[1]}"}
    copy = folder / path.name if (folder / path.name).is_file() else "..."
    why = f"the file of its task, {path}, {'came with it' if came_along else 'is missing or has changed'}"
    raise UserError(f"'{folder}': {why}: name the file that it was made with, if you trust it: task_file={copy}")


def _came_in(folder: Path, path: Path) -> bool:
    return folder.resolve() in path.resolve().parents


def checked(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section ``task``, with the hash of the file if its name is a reference. UserError unless it is named."""
    if (found := reference(section["name"])) is None:
        return dict(section)
    if found[0] not in _named:
        cure = f"name its file on the command line, if you trust it: task_file={found[0]}"
        raise UserError(f"task {section['name']}: {cure}")
    return {**section, "task_sha256": sha256(found[0])}


def keep_copy(name: str, folder: Path) -> None:
    """Copy the file of a reference into a folder, unless it is there; do nothing for another name."""
    if (found := reference(name)) and not (folder / found[0].name).exists():
        shutil.copy(found[0], folder)


def load(path: Path) -> ModuleType:
    """Import a file. UserError, with the line in the file, if that fails."""
    path = find_file("file", str(path))
    try:
        return import_module(f"{__name__}.{quote(str(path)).replace('.', '%2E')}")
    except Exception as error:  # code of others may raise anything
        raise UserError(f"importing {path} failed: {describe_error(error)}") from error


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the source: bytecode beside the file would escape the hash."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        loader = _Loader(fullname, unquote(name))
        return spec_from_file_location(fullname, loader.path, loader=loader) if package == __name__ else None


sys.meta_path.append(_Finder())
