"""The error for bad input, and suggestions of names for its message."""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

PYTHON = f"{Path(traceback.__file__).parent}/"  # the standard library
TYPES: dict[type, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "a section with keys",
}  # fmt: skip
"""Types of values in the words of a user."""
MOST_LISTED, NEAREST = 30, 3  # names in a message: all of so many, or else the nearest
SYNONYMS = {"gpu": "cuda"}  # words for names that look like another one


class UserError(ValueError):
    """Bad input. Commands print its message without a traceback and exit with code 2."""


def one_line(text: object) -> str:
    """Return a text of another library, a network or a file as one line, with control characters escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(str(text).split()))


def describe_error(error: BaseException) -> str:
    """Return type, place and message of an error of someone else's code: ``ValueError in maze.py, line 12: no exit``.

    The place is the innermost one in code of the user if there is any, else in a package, else in this project. The
    line there stands for a message that is missing, as that of ``assert cells > 0``.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} in {Path(error.filename).name}, line {error.lineno}: {error.msg}"
    ours = f"{Path(__file__).parents[1]}/"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((ours, PYTHON, "<"))]
    own = [frame for frame in theirs if "-packages" not in frame.filename]
    place, line = "", ""
    for frame in (own or theirs or frames)[-1:]:
        place, line = f" in {Path(frame.filename).name}, line {frame.lineno}", frame.line or ""
    return f"{type(error).__name__}{place}: {one_line(error) or line}"


def check_base(part: object, base: type, name: str) -> None:
    """Raise UserError unless ``part`` inherits a base class of ours. name: of the part in a configuration."""
    if not isinstance(part, base):
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        wanted = f"from {base.__module__} import {base.__name__}"
        raise UserError(f"{name}: class {kind} must inherit {base.__name__} ({wanted})")


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to ``name``, upper or lower case, or None if none is close."""
    names = list(allowed)
    if SYNONYMS.get(name) in names:
        return SYNONYMS[name]
    return next(iter(_closest(name, names, 1, 0.5)), None)


def _closest(name: str, names: Iterable[str], number: int, cutoff: float) -> list[str]:
    """Return up to so many names whose similarity with ``name`` is ``cutoff`` or more, from 0 to 1, closest first."""
    by_lower = {other.lower(): other for other in names}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, number, cutoff)]


class NeedsCameras(UserError):
    """Raised for an environment that observes images alone, if no camera is asked for. cameras: the images' names."""

    def __init__(self, message: str, cameras: tuple[str, ...]) -> None:
        super().__init__(message)
        self.cameras = cameras


def unknown_name(kind: str, got: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a name that is not in ``allowed``; its message lists these and suggests the nearest.

    Of more than MOST_LISTED names it lists the NEAREST.
    """
    names, listed = sorted(allowed), "Allowed:"
    hint = _hint(nearest(got, names))
    if len(names) > MOST_LISTED:
        names, listed = _closest(got, names, NEAREST, 0.0), f"Allowed are {len(names)}, the nearest:"
    return UserError(f"unknown {kind} '{got}'.{hint} {listed} {', '.join(names)}")


def wrong_value(key: str, got: str, allowed: str, suggestion: str | None = None) -> UserError:
    """Return the error for a value that a key does not allow; its message says what is allowed, in words."""
    return UserError(f"{key}: got {got}, allowed: {allowed}{'.' if suggestion else ''}{_hint(suggestion)}")


def missing_key(key: str) -> UserError:
    return UserError(f"{key} is missing: give {key}=...")


def _hint(suggestion: str | None) -> str:
    return f" Did you mean '{suggestion}'?" if suggestion else ""
