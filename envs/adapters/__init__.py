"""Other simulators as families of environments, one file each (see ``embodied.envs.registry.Family``)."""
