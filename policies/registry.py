"""Registry of the policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embodied.core.registry import Registry
from embodied.policies.config import CategoricalConfig, DSRLConfig, FlowConfig, GaussianConfig, VLAConfig

if TYPE_CHECKING:
    from embodied.core.policy import Policy

POLICIES: Registry[Callable[..., Policy]] = Registry("policy")
"""Builders, called as ``build(spec, config)`` with an EnvSpec and an instance of the entry's config dataclass."""

POLICIES.declare("gaussian", "embodied.policies.gaussian:GaussianPolicy", GaussianConfig)
POLICIES.declare("flow", "embodied.policies.flow.policy:FlowPolicy", FlowConfig)
POLICIES.declare("dsrl", "embodied.policies.dsrl:DSRLPolicy", DSRLConfig)
POLICIES.declare("categorical", "embodied.policies.categorical:CategoricalPolicy", CategoricalConfig)
POLICIES.declare("vla", "embodied.policies.vla.policy:VLAPolicy", VLAConfig)
POLICIES.declare("vla_tiny", "embodied.policies.vla.policy:VLAPolicy", VLAConfig)
