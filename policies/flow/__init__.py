"""Flow policy: one denoise step (``step``), the integration of many (``sampler``), networks and the policy."""

from policies.flow.policy import FlowConfig, FlowPolicy

__all__ = ["FlowConfig", "FlowPolicy"]
