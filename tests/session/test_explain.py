"""``--config`` prints the configuration with the meaning of each option."""

from __future__ import annotations

import json

import pytest
import yaml

from embodied.session.config import compose_run, to_mapping
from embodied.session.explain import explain


@pytest.mark.parametrize("words", [{}, {"policy": "vla_tiny", "task": "tabletop"}, {"randomization": "sim2real"}])
def test_the_printed_configuration_is_that_of_the_run(words: dict[str, str]) -> None:
    config = compose_run(words)
    assert yaml.safe_load(explain(config)) == json.loads(json.dumps(to_mapping(config)))


def test_an_option_of_a_base_class_has_its_meaning() -> None:
    lines = [line.split("#") for line in explain(compose_run({})).splitlines()]
    meanings = {parts[0].strip(): parts[1].strip() for parts in lines if len(parts) == 2}
    assert meanings["critic_hidden: [128, 128]"] == "Widths of the critic's hidden layers"
    assert meanings["gamma: 0.95"].startswith("Discount per control step")
