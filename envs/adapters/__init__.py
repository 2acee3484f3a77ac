"""Other simulators as families of environments, one file each (see ``envs.registry.Family``)."""
