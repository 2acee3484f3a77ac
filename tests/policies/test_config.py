"""Bad options read well, and configs/policy holds only what differs from the dataclasses."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from embodied.core.errors import UserError
from embodied.core.options import from_mapping
from embodied.policies import POLICIES
from embodied.policies.config import FlowConfig, GaussianConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "policy"


@pytest.mark.parametrize(
    ("config", "options", "key"),
    [
        (FlowConfig, {"execute": 5, "horizon": 4}, "execute"),
        (FlowConfig, {"execute": 0}, "execute"),
        (FlowConfig, {"horizon": 0}, "horizon"),
        (FlowConfig, {"horizon": 2.5}, "horizon"),
        (FlowConfig, {"denoise_steps": 0}, "denoise_steps"),
        (FlowConfig, {"denoise_steps": True}, "denoise_steps"),
        (FlowConfig, {"sigma_min": 1.0}, "sigma_min"),
        (FlowConfig, {"sigma_min": 0.0}, "sigma_min"),
        (FlowConfig, {"sigma_init": 1.0}, "sigma_init"),
        (FlowConfig, {"sigma_init": float("nan")}, "sigma_init"),
        (FlowConfig, {"head_hidden": ()}, "head_hidden"),
        (FlowConfig, {"actor_hidden": (256, 0)}, "actor_hidden"),
        (FlowConfig, {"critic_hidden": 256}, "critic_hidden"),
        (GaussianConfig, {"execute": 2, "horizon": 1}, "execute"),
        (GaussianConfig, {"init_std": 0.01}, "init_std"),
        (GaussianConfig, {"min_std": 2.0}, "min_std"),
    ],
)
def test_a_bad_value_names_its_key_and_what_is_allowed(config, options, key):
    with pytest.raises(UserError, match=rf"^{key}(\[\d\])?: got .*, allowed: "):
        config(**options)
    with pytest.raises(UserError, match=rf"^policy\.{key}(\[\d\])?: got .*, allowed: "):
        from_mapping(config, options, "policy")


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"prediction": "actions"}, "action"),
        ({"exploration": "flow-noise"}, "flow_noise"),
        ({"activation": "slu"}, "silu"),
    ],
)
def test_a_misspelt_name_suggests_the_nearest(options, nearest):
    with pytest.raises(UserError, match=f"{next(iter(options))}: got .*Did you mean '{nearest}'"):
        FlowConfig(**options)


def test_an_unknown_policy_suggests_the_nearest():
    with pytest.raises(UserError, match=r"unknown policy 'gausian'\. Did you mean 'gaussian'"):
        POLICIES["gausian"]


@pytest.mark.parametrize("name", POLICIES.names())
def test_yaml_lists_only_what_differs_from_the_dataclass(name):
    loaded = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert loaded.pop("name") == name
    loaded.pop("tuned", None)
    config = POLICIES[name].config
    made, defaults = from_mapping(config, loaded, "policy"), config()
    assert [key for key in loaded if getattr(made, key) == getattr(defaults, key)] == []
