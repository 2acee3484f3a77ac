"""The configuration of a run as YAML, with what each option means beside it (``embodied.train --config``)."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from embodied.session.config import RunConfig, Section, to_mapping

WIDTH = 40  # characters of an option beside its meaning


def explain(config: RunConfig) -> str:
    """Return the configuration as YAML; a comment is the first sentence of the text below the option's field."""
    return "\n".join(_lines(config, to_mapping(config), ""))


def meanings(options: type[Any]) -> dict[str, str]:
    """Return the texts below the fields of a dataclass and of its bases, by field."""
    found: dict[str, str] = {}
    for cls in reversed([cls for cls in options.__mro__ if is_dataclass(cls)]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for above, below in zip(definition.body, definition.body[1:], strict=False):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _lines(options: Any, values: dict[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a section. values: those of its options, as plain values."""
    if isinstance(options, Section):
        options = options.options
    about, names = meanings(type(options)), [field.name for field in fields(options)]
    for name in ["name"] * ("name" in values and "name" not in names) + names:
        option = getattr(options, name, None)
        if is_dataclass(option):
            yield f"{indent}{name}:"
            yield from _lines(option, values[name], indent + "  ")
            continue
        value = yaml.safe_dump(values[name], default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip()
        meaning = re.split(r"(?<! al)\. ", about.get(name, ""))[0].rstrip(".")
        yield f"{indent + name}: {value}".ljust(WIDTH) + f"  # {meaning}" if meaning else f"{indent}{name}: {value}"
