"""Flow policy: a denoise step (``step``), chains of steps (``sampler``, ``chains``), the networks and the policy."""
