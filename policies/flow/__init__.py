"""Flow policy: a denoise step (``step``), chains of steps (``sampler``, ``chains``), the networks and the policy."""

from embodied.policies.flow.policy import FlowConfig, FlowPolicy

__all__ = ["FlowConfig", "FlowPolicy"]
