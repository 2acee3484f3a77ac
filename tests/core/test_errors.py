"""Errors of other people's code in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from embodied.core.errors import describe_error, unknown_name
from embodied.core.options import from_mapping


def test_an_error_in_code_of_the_user_is_placed_there_and_not_in_the_library_that_it_called() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    text = describe_error(caught.value)
    assert text.startswith("JSONDecodeError in test_errors.py, line 16: Expecting property name")


def without_this_file(error: BaseException) -> BaseException:
    """Return an error as if nothing of the user had called what raised it."""
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def test_few_names_are_listed_and_of_many_the_nearest() -> None:
    assert str(unknown_name("robot", "PANDAS", ["so101", "panda"])) == (
        "unknown robot 'PANDAS'. Did you mean 'panda'? Allowed: panda, so101"
    )
    texts = [f"put the {colour} {shape} away" for colour in ("Red", "blue", "green", "grey") for shape in "abcdefghij"]
    assert str(unknown_name("instruction", "put the red ball away", texts)) == (
        "unknown instruction 'put the red ball away'. Did you mean 'put the Red b away'? "
        "Allowed are 40, the nearest: put the Red b away, put the Red a away, put the Red j away"
    )
    assert str(unknown_name("instruction", "?", texts)).count("put the") == 3


def test_an_error_of_a_package_is_placed_in_the_package() -> None:
    space: dict[str, Any] = {}
    exec(compile("def walk():\n    raise KeyError('exit')", "/usr/lib/python3/dist-packages/maze.py", "exec"), space)
    with pytest.raises(KeyError) as caught:
        space["walk"]()
    assert describe_error(without_this_file(caught.value)) == "KeyError in maze.py, line 2: 'exit'"


def test_an_error_of_this_project_is_placed_too() -> None:
    with pytest.raises(AttributeError) as caught:
        from_mapping(None, {"a": 1})  # type: ignore[arg-type]
    assert describe_error(without_this_file(caught.value)).startswith("AttributeError in options.py, line ")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert describe_error(ValueError("too\n large")) == "ValueError: too large"
