"""Options of benchmarks whose modules import torch. Nothing here does, so that a mistyped word is answered at once."""

from typing import Literal, get_args

from embodied.core.options import config_dataclass

Part = Literal["engine", "flatness", "envpool", "warp", "adapters", "memory"]


@config_dataclass
class SimOptions:
    """Options after ``bench sim``."""

    parts: tuple[Part, ...] = get_args(Part)
