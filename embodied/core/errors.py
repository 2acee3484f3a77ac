"""Errors that a user can cause, and how they read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. Commands print its message without a traceback and exit with code 2."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to ``name``, or None if none is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(kind: str, got: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not one of ``allowed``; it lists them and suggests the nearest."""
    names = sorted(allowed)
    suggestion = nearest(got, names)
    hint = f" Did you mean '{suggestion}'?" if suggestion else ""
    return UserError(f"unknown {kind} '{got}'.{hint} Allowed: {', '.join(names)}")
