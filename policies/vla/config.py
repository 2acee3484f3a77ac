"""Options of the vision-language-action policy."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from embodied.core.errors import UserError
from embodied.core.options import NonNegativeInt, PositiveInt, config_dataclass
from embodied.policies.config import CameraConfig, ChainConfig

Part = Literal["vision", "language"]
PARTS: tuple[Part, ...] = get_args(Part)


@config_dataclass
class VLAConfig(ChainConfig, CameraConfig):
    """Options of VLAPolicy."""

    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("front", "wrist")
    """Cameras whose images the policy observes, in this order."""
    image_size: PositiveInt = 224
    """Pixels of the square images."""
    max_tokens: PositiveInt = 48
    """Largest number of tokens of an instruction."""
    pretrained: str | None = None
    """Directory of a checkpoint of transformers, with tokenizer and processor."""
    model: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' PI0Config. Language model and action expert need the same number of layers."""
    freeze: tuple[Part, ...] = ()
    """Parts that are not trained. If both are frozen, their outputs are computed once per update."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA on the attention of the action expert; 0: all weights of the expert are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights of vision and language; bfloat16 needs both to be frozen."""
    compile: bool = False
    """Compile the action expert by torch.compile."""
    prefix_cache_mb: NonNegativeInt = 1024
    """Memory (MB) that the outputs of the frozen part may take for a learner's batch, a data set or the scenes of
    imitation. If they need more, they are recomputed whenever they are used. Outputs that the actor passes on are not
    checked."""
    prefix_from_actor: bool = False
    """The actor passes the outputs of the frozen part to the learner in place of the images. For vla_tiny they take
    34 kB per decision, the images 25 kB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != "float32" and set(self.freeze) != set(PARTS):
            raise UserError(f"dtype: got {self.dtype}, allowed: float32 unless freeze={list(PARTS)}")

    def architecture(self, action_dim: int, vocabulary: int, image_token: int, pad_token: int) -> dict[str, Any]:
        """Return keyword arguments of PI0Config for a fresh model: ``model``, with defaults derived from the task."""
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
        return _merge_nested(own, self.model)


def _merge_nested(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested dictionaries; where both have a value, that of ``theirs`` is used."""
    merged = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge_nested(merged[key], value) if both else value
    return merged
