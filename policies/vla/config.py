"""Options of the vision-language-action policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import Count, Natural, config_dataclass
from policies.flow.chains import ChainConfig

Part = Literal["vision", "language"]
PARTS: tuple[Part, ...] = get_args(Part)


@config_dataclass
class VLAConfig(ChainConfig):
    """Options of VLAPolicy."""

    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("front", "wrist")
    """Cameras that the policy sees, in this order."""
    image_size: Count = 224
    """Pixels of the square images."""
    max_tokens: Count = 48
    """Tokens of the longest instruction."""
    pretrained: str | None = None
    """Directory of a checkpoint of transformers, with tokenizer and processor."""
    model: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' PI0Config. A layer of the expert reads one of the language model."""
    freeze: tuple[Part, ...] = ()
    """Parts whose weights stay. With both frozen, their share of a decision is computed once per update."""
    lora_rank: Natural = 0
    """Rank of an adaptation of the action expert's attention; 0 trains all its weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of vision and language once both are frozen."""
    compile: bool = False
    """Compile the action expert by torch.compile."""
    prefix_cache_mb: Natural = 1024
    """Most that the outputs of the frozen part may take for a learner's batch, a data set or the scenes of imitation;
    above it they are computed when they are needed."""
    prefix_from_actor: bool = False
    """The actor hands on the outputs of the frozen part in place of its images: vla_tiny 34 kB per decision for 25."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.cameras)) < len(self.cameras):
            raise UserError(f"cameras: got {list(self.cameras)}, allowed: each camera once")
        if self.dtype != "float32" and set(self.freeze) != set(PARTS):
            raise UserError(f"dtype: got {self.dtype}, allowed: float32 unless freeze={list(PARTS)}")

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
