"""The words of instructed tasks, as data: which objects there are, where they can go and how that is said."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import yaml

from embodied.core.config import from_mapping
from embodied.core.errors import UserError, unknown_name
from embodied.core.spec import TRAIN, Instruction
from envs.mujoco.scene import Shape

CONFIG_FILE = Path(__file__).resolve().parents[2] / "configs" / "task" / "tabletop.yaml"
HELD_OUT = "held_out"
PLACEHOLDERS = ("color", "shape", "tray")


@dataclass(frozen=True)
class Words:
    """Every colour x shape x tray is a goal, and every template says it.

    shapes: by name. colors: red, green, blue from 0 to 1. trays: x and y (m) of their centres. templates: texts with
    {color}, {shape} and {tray}. held_out: (colour, shape, tray) of the goals that are not trained on.
    UserError for fewer than two shapes, colours or trays, unknown words, and texts that do not tell goals apart.
    """

    shapes: dict[str, Shape]
    colors: dict[str, tuple[float, float, float]]
    trays: dict[str, tuple[float, float]]
    templates: tuple[str, ...]
    held_out: tuple[tuple[str, str, str], ...] = ()

    def __post_init__(self) -> None:
        for kind in ("shapes", "colors", "trays"):
            if len(getattr(self, kind)) < 2:
                raise UserError(f"{kind}: got {len(getattr(self, kind))}, needed are two or more to choose from")
        for name, rgb in self.colors.items():
            if not all(0 <= value <= 1 for value in rgb):
                raise UserError(f"colors.{name}: got {list(rgb)}, allowed: red, green and blue from 0 to 1")
        self._check_templates()
        self._check_held_out()

    def _check_templates(self) -> None:
        if not self.templates:
            raise UserError("templates is empty: give one text at least")
        for i, template in enumerate(self.templates):
            try:
                found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
            except ValueError as error:
                raise UserError(f"templates[{i}]: cannot read {template!r}: {error}") from error
            for name in sorted(found - set(PLACEHOLDERS)):
                raise unknown_name(f"placeholder in templates[{i}]", name, PLACEHOLDERS)
            missing = [f"{{{name}}}" for name in PLACEHOLDERS if name not in found]
            if missing:
                raise UserError(f"templates[{i}]: {template!r} lacks {', '.join(missing)}")
        texts = [instruction.text for instruction in self.instructions]
        twice = sorted({text for text in texts if texts.count(text) > 1})
        if twice:
            raise UserError(f"templates: '{twice[0]}' is said twice; every text must be there once")

    def _check_held_out(self) -> None:
        known = dict(zip(PLACEHOLDERS, (self.colors, self.shapes, self.trays), strict=True))
        for i, goal in enumerate(self.held_out):
            for (kind, words), word in zip(known.items(), goal, strict=True):
                if word not in words:
                    raise unknown_name(f"{kind} in held_out[{i}]", word, words)
        if len(set(self.held_out)) < len(self.held_out):
            raise UserError("held_out names a goal twice")
        if len(self.held_out) == len(self.goals):
            raise UserError("held_out names every goal: nothing is left to train on")

    @cached_property
    def goals(self) -> tuple[tuple[str, str, str], ...]:
        """(colour, shape, tray) of every goal; instruction i asks for goal i // len(templates)."""
        return tuple(product(self.colors, self.shapes, self.trays))

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """Goal after goal, each in the words of every template."""
        return tuple(
            Instruction(
                template.format(color=color, shape=shape, tray=tray),
                goal=f"{color} {shape} -> {tray} tray",
                split=HELD_OUT if (color, shape, tray) in self.held_out else TRAIN,
            )
            for color, shape, tray in self.goals
            for template in self.templates
        )


def default_words() -> Words:
    """Those of configs/task/tabletop.yaml."""
    data: Mapping[str, object] = yaml.safe_load(CONFIG_FILE.read_text(encoding="utf-8"))["words"]
    return from_mapping(Words, data, "words")
