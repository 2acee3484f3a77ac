"""Other simulators, each a family of environments (envs.registry.Family)."""
