"""Options of the vision-language-action policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.base import check, check_name, is_positive_int
from policies.flow.chains import ChainConfig

PARTS = ("vision", "language")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class VLAConfig(ChainConfig):
    """Options of VLAPolicy; configs/policy/vla_tiny.yaml says what each one means. UserError on a bad value."""

    cameras: tuple[str, ...] = ("front", "wrist")
    image_size: int = 224
    max_tokens: int = 48
    pretrained: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    lora_rank: int = 0
    dtype: str = "float32"
    compile: bool = False
    prefix_cache_mb: int = 1024
    prefix_from_actor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        distinct = len(self.cameras) > 0 and len(set(self.cameras)) == len(self.cameras)
        check(distinct, "cameras", self.cameras, "a list of one or more names of cameras, each once")
        for key in ("image_size", "max_tokens"):
            check(is_positive_int(getattr(self, key)), key, getattr(self, key), "an integer of at least 1")
        for part in self.freeze:
            check_name("freeze", part, PARTS)
        check_name("dtype", self.dtype, DTYPES)
        cast = self.dtype == "float32" or set(self.freeze) == set(PARTS)
        check(cast, "dtype", self.dtype, "float32 unless vision and language are both frozen (policy.freeze)")
        for key in ("lora_rank", "prefix_cache_mb"):
            check(getattr(self, key) >= 0, key, getattr(self, key), "an integer of at least 0")

    def architecture(self, action_dim: int, vocabulary: int, image_token: int, pad_token: int) -> dict[str, Any]:
        """Keyword arguments of PI0Config for a model that is not loaded: ``model`` with what follows from the rest."""
        own: dict[str, Any] = {
            "chunk_size": self.horizon,
            "max_action_dim": action_dim,
            "num_inference_steps": self.denoise_steps,
            "vlm_config": {
                "model_type": "paligemma",
                "image_token_id": image_token,
                "text_config": {"model_type": "gemma", "vocab_size": vocabulary, "pad_token_id": pad_token},
                "vision_config": {"model_type": "siglip_vision_model", "image_size": self.image_size},
            },
            "dit_config": {"model_type": "gemma", "pad_token_id": pad_token},
        }
        return _merged(own, self.model)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both dictionaries, nested ones entry by entry; ``theirs`` decides where both have a value."""
    merged = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
