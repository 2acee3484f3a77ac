"""Bad options read well, and configs/policy says what the code says."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from embodied.core.errors import UserError
from policies import POLICIES, FlowConfig, GaussianConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "policy"


@pytest.mark.parametrize(
    ("config", "options", "key"),
    [
        (FlowConfig, {"execute": 5, "horizon": 4}, "policy.execute"),
        (FlowConfig, {"execute": 0}, "policy.execute"),
        (FlowConfig, {"horizon": 0}, "policy.horizon"),
        (FlowConfig, {"horizon": 2.5}, "policy.horizon"),
        (FlowConfig, {"denoise_steps": 0}, "policy.denoise_steps"),
        (FlowConfig, {"denoise_steps": True}, "policy.denoise_steps"),
        (FlowConfig, {"sigma_min": 1.0}, "policy.sigma_min"),
        (FlowConfig, {"sigma_min": 0.0}, "policy.sigma_min"),
        (FlowConfig, {"sigma_init": 1.0}, "policy.sigma_init"),
        (FlowConfig, {"sigma_init": float("nan")}, "policy.sigma_init"),
        (FlowConfig, {"head_hidden": ()}, "policy.head_hidden"),
        (FlowConfig, {"actor_hidden": (256, 0)}, "policy.actor_hidden"),
        (FlowConfig, {"critic_hidden": 256}, "policy.critic_hidden"),
        (GaussianConfig, {"execute": 2, "horizon": 1}, "policy.execute"),
        (GaussianConfig, {"init_std": 0.01}, "policy.init_std"),
        (GaussianConfig, {"min_std": 2.0}, "policy.min_std"),
    ],
)
def test_a_bad_value_names_its_key_and_what_is_allowed(config, options, key):
    with pytest.raises(UserError, match=rf"{key}: got .*, allowed: "):
        config(**options)


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"prediction": "actions"}, "action"),
        ({"exploration": "flow-noise"}, "flow_noise"),
        ({"activation": "slu"}, "silu"),
    ],
)
def test_a_misspelt_name_suggests_the_nearest(options, nearest):
    with pytest.raises(UserError, match=f"unknown policy.{next(iter(options))} .*Did you mean '{nearest}'"):
        FlowConfig(**options)


def test_an_unknown_policy_suggests_the_nearest():
    with pytest.raises(UserError, match=r"unknown policy 'gausian'\. Did you mean 'gaussian'"):
        POLICIES["gausian"]


SIZES_OF_ONE = ("vla", "vla_tiny")  # one class under two names: the YAML files say how they differ
ONE_EACH = [name for name in POLICIES.names() if name not in SIZES_OF_ONE]


@pytest.mark.parametrize("name", ONE_EACH)
def test_yaml_lists_every_option_with_its_default_and_a_comment(name):
    path = CONFIGS / f"{name}.yaml"
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    assert loaded.pop("name") == name
    defaults = {f.name: f.default for f in fields(POLICIES[name].config)}
    assert MISSING not in defaults.values()
    assert loaded == {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    lines = path.read_text().splitlines()
    assert [line for line in lines if "#" not in line] == [f"name: {name}"]
    POLICIES[name].config(**loaded)


@pytest.mark.parametrize("name", SIZES_OF_ONE)
def test_yaml_of_a_size_lists_every_option(name):
    loaded = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert loaded.pop("name") == name
    assert set(loaded) == {f.name for f in fields(POLICIES[name].config)}
    POLICIES[name].config(**loaded)
