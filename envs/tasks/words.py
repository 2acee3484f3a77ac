"""Vocabulary of the task tabletop."""

import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

import embodied
from embodied.core.errors import UserError, unknown_name
from embodied.core.options import Fraction, config_dataclass, from_mapping
from embodied.core.spec import TRAIN, Instruction
from embodied.envs.mujoco.config import Scale, Shape

CONFIG_FILE = Path(embodied.__file__).parent / "configs" / "task" / "tabletop.yaml"
HELD_OUT = "held_out"
PLACEHOLDERS = ("color", "shape", "tray")


@config_dataclass
class Words:
    """Vocabulary of a task. Every colour x shape x tray is a goal, and every template is a text for each goal.

    UserError for unknown words, and for templates that give two instructions the same text.
    """

    shapes: Annotated[dict[str, Shape], Field(min_length=2)]
    """Shapes by name."""
    colors: Annotated[dict[str, tuple[Fraction, Fraction, Fraction]], Field(min_length=2)]
    """Red, green and blue, 0 to 1, of the colours by name."""
    trays: Annotated[dict[str, tuple[float, float]], Field(min_length=2)]
    """x and y of the trays' centres, m, by name."""
    templates: Annotated[tuple[str, ...], Field(min_length=1)]
    """Texts with {color}, {shape} and {tray}."""
    held_out: tuple[tuple[str, str, str], ...] = ()
    """(colour, shape, tray) of the goals that are not trained on."""

    def __post_init__(self) -> None:
        for i, template in enumerate(self.templates):
            try:
                used = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
            except ValueError as error:
                raise UserError(f"templates[{i}]: cannot read {template!r}: {error}") from error
            for name in sorted(used - set(PLACEHOLDERS)):
                raise unknown_name(f"placeholder in templates[{i}]", name, PLACEHOLDERS)
            if missing := [f"{{{name}}}" for name in PLACEHOLDERS if name not in used]:
                raise UserError(f"templates[{i}]: {template!r} lacks {', '.join(missing)}")
        for text, count in Counter(instruction.text for instruction in self.instructions).items():
            if count > 1:
                raise UserError(f"templates: '{text}' is said twice; every text must be there once")
        known = {"color": list(self.colors), "shape": list(self.shapes), "tray": list(self.trays)}
        for i, goal in enumerate(self.held_out):
            for kind, word in zip(PLACEHOLDERS, goal, strict=True):
                if word not in known[kind]:
                    raise unknown_name(f"{kind} in held_out[{i}]", word, known[kind])
        if len(set(self.held_out)) < len(self.held_out):
            raise UserError("held_out names a goal twice")
        if len(self.held_out) == len(self.goals):
            raise UserError("held_out names every goal: nothing is left to train on")

    def scaled(self, scale: Scale, defaults: "Words") -> "Words":
        """Return the words with the shapes and trays for a robot. Those that differ from ``defaults`` stay."""
        shapes, trays = dict(self.shapes), dict(self.trays)
        for name, shape in defaults.shapes.items():
            if shapes.get(name) == shape:
                shapes[name] = replace(shape, size_m=tuple(scale.size * x for x in shape.size_m))
        for name, (x, y) in defaults.trays.items():
            if trays.get(name) == (x, y):
                trays[name] = (scale.reach * x, scale.reach * y)
        return replace(self, shapes=shapes, trays=trays)

    @cached_property
    def goals(self) -> tuple[tuple[str, str, str], ...]:
        """(colour, shape, tray) of every goal; instruction i has goal i // len(templates)."""
        return tuple(product(self.colors, self.shapes, self.trays))

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """Instructions in the order of goals, and for each goal in the order of templates."""
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
    """Return the words of configs/task/tabletop.yaml."""
    data: Mapping[str, object] = yaml.safe_load(CONFIG_FILE.read_text(encoding="utf-8"))["words"]
    return from_mapping(Words, data, "words")
