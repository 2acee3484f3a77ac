"""Checkpoints in the layout of transformers: what ``from_pretrained`` loads and ``save_pretrained`` writes.

config.json  model.safetensors (or shards)  tokenizer.json, tokenizer_config.json  preprocessor_config.json
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, PI0Config, PI0ForConditionalGeneration
from transformers.utils import logging as transformers_logging

from embodied.core.errors import UserError
from embodied.core.spec import EnvSpec
from policies.vla.config import VLAConfig
from policies.vla.lora import merged
from policies.vla.text import image_token_id, train_tokenizer

EXPECTED = {
    "config.json": ("config.json",),
    "weights (model.safetensors)": ("model.safetensors", "model.safetensors.index.json"),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model"),
    "an image processor (preprocessor_config.json)": ("preprocessor_config.json", "processor_config.json"),
}
WEIGHTS = "weights (model.safetensors)"
ABSENT = "absent"
LISTED = 12  # names of a directory in an error
LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError, StrictDataclassError,
)  # fmt: skip

if not sys.stderr.isatty():  # plain lines in a log; on a terminal, gigabytes of weights show how far they are
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class Pixels(NamedTuple):
    """Mean and standard deviation that images in [0, 1] are normalised with, each of 3 colours."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class Parts(NamedTuple):
    """model: a PI0ForConditionalGeneration. tokenizer: of its words."""

    model: nn.Module
    tokenizer: Any
    pixels: Pixels


def build(spec: EnvSpec, config: VLAConfig) -> Parts:
    """A fresh model for the task, with a tokenizer trained on its instructions, or what ``config.pretrained`` holds.

    A checkpoint without weights is accepted only where a run keeps it for its architecture (``save_architecture``).
    UserError that names what is missing or does not fit.
    """
    if config.pretrained is None:
        return _fresh(spec, config)
    path = Path(config.pretrained)
    missing = [what for what, names in EXPECTED.items() if not any((path / name).is_file() for name in names)]
    architecture_only = missing == [WEIGHTS] and (path / ".architecture").is_file()
    if missing and not architecture_only:
        raise UserError(f"policy.pretrained={path} lacks {'; '.join(missing)}. It has: {_listing(path)}")
    with _loading(path):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model_config = PI0Config.from_pretrained(path, local_files_only=True)
        pixels = _pixels(path)
    for key, (wanted, there) in _differing(config.model, model_config.to_dict()).items():
        raise UserError(f"policy.model.{key}={wanted} does not fit policy.pretrained={path}, where it is {there}")
    with _loading(path):
        if architecture_only:
            return Parts(PI0ForConditionalGeneration(model_config), tokenizer, pixels)
        loaded: Any = PI0ForConditionalGeneration.from_pretrained(
            path, config=model_config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    model, lacking = loaded[0], loaded[1]["missing_keys"]
    if lacking:
        some = ", ".join(sorted(lacking)[:3])
        raise UserError(f"policy.pretrained={path} lacks {len(lacking)} of the model's weights, for instance {some}")
    return Parts(model, tokenizer, pixels)


def _listing(path: Path) -> str:
    """What is in a directory that should be a checkpoint, for an error."""
    if not path.is_dir():
        return "no such directory"
    names = sorted(entry.name for entry in path.iterdir())
    more = [f"{len(names) - LISTED} more"] if len(names) > LISTED else []
    return ", ".join(names[:LISTED] + more) or "nothing"


@contextmanager
def _loading(path: Path) -> Iterator[None]:
    """What goes wrong in reading a checkpoint is a UserError that names it."""
    try:
        yield
    except LOADING_ERRORS as error:
        raise UserError(f"policy.pretrained={path} cannot be loaded: {error}") from error


def _fresh(spec: EnvSpec, config: VLAConfig) -> Parts:
    """A model of random weights, of the sizes that ``config.model`` says."""
    if not config.model:
        raise UserError(
            "policy=vla goes on from a model: give policy.pretrained=<directory of a checkpoint of π0> or "
            "init=<run directory>; policy=vla_tiny begins with a fresh one"
        )
    unknown = [key for key, (_, has) in _differing(config.model, PI0Config().to_dict()).items() if has is ABSENT]
    if unknown:
        raise UserError(f"unknown key 'policy.model.{unknown[0]}': PI0Config of transformers has no such entry")
    tokenizer = train_tokenizer(spec.texts)
    arguments = config.architecture(spec.action_dim, len(tokenizer), image_token_id(tokenizer), tokenizer.pad_token_id)
    try:
        model_config = PI0Config(**arguments)
    except LOADING_ERRORS as error:
        raise UserError(f"policy.model: {error}") from error
    return Parts(PI0ForConditionalGeneration(model_config), tokenizer, Pixels())


def _differing(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What ``wanted`` says otherwise than ``there``: both values by the dotted name, ABSENT for what is not there."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, value in wanted.items():
        has = there.get(key, ABSENT)
        if isinstance(value, Mapping) and isinstance(has, Mapping):
            found |= {f"{key}.{inner}": both for inner, both in _differing(value, has).items()}
        elif value != has:
            found[key] = (value, has)
    return found


def check_fits(parts: Parts, spec: EnvSpec, config: VLAConfig) -> None:
    """UserError unless the model takes this task's state, actions and cameras and this policy's sizes."""
    model: Any = parts.model.config
    needed = {
        "policy.horizon": (config.horizon, model.chunk_size),
        "policy.image_size": (config.image_size, model.vlm_config.vision_config.image_size),
    }
    for key, (got, expected) in needed.items():
        if got != expected:
            raise UserError(f"{key}={got} does not fit the model, which was made for {expected}")
    patch = model.vlm_config.vision_config.patch_size
    if config.image_size % patch:
        raise UserError(
            f"policy.image_size={config.image_size} must be a multiple of the model's patches, {patch} pixels"
        )
    for what, size, largest in (
        ("state", spec.state_dim, model.max_state_dim), ("action", spec.action_dim, model.max_action_dim)
    ):  # fmt: skip
        if size > largest:
            raise UserError(f"the {what} of task {spec.task} has {size} entries, the model takes {largest} at most")
    text, expert = model.vlm_config.text_config, model.dit_config
    if model.vlm_config.projection_dim != text.hidden_size:
        raise UserError(
            f"policy.model: vlm_config.projection_dim is {model.vlm_config.projection_dim}, of image tokens, and "
            f"text_config.hidden_size is {text.hidden_size}, of words: they must be equal"
        )
    for name, part in (("text_config", text), ("dit_config", expert)):
        if part.num_attention_heads % part.num_key_value_heads:
            raise UserError(
                f"policy.model: {name}.num_attention_heads, {part.num_attention_heads}, must be a multiple of "
                f"num_key_value_heads, {part.num_key_value_heads}"
            )
    for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        if getattr(text, key) != getattr(expert, key):
            raise UserError(
                f"policy.model: {key} is {getattr(expert, key)} in dit_config and {getattr(text, key)} in text_config; "
                "each layer of the expert attends to what the same layer of the language model has"
            )
    seen = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
    for name in config.cameras:
        if seen.get(name) != (config.image_size, config.image_size):
            has = ", ".join(f"{camera} {height}x{width}" for camera, (height, width) in seen.items()) or "none"
            raise UserError(
                f"policy.cameras: the policy sees '{name}' at {config.image_size}x{config.image_size}; this "
                f"environment has: {has}"
            )


def save_architecture(parts: Parts, path: Path) -> None:
    """All of a checkpoint but its weights, for a run that keeps those in its own checkpoints."""
    path.mkdir(parents=True)
    model: Any = parts.model
    model.config.save_pretrained(path)
    _save_processor(parts, path)
    (path / ".architecture").touch()


def save_pretrained(parts: Parts, path: Path) -> None:
    """A checkpoint that plain transformers loads: LoRA is merged into the weights, everything in float32."""
    model: Any = merged(copy.deepcopy(parts.model).float())
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    _save_processor(parts, path)
    (path / ".architecture").unlink(missing_ok=True)


def _save_processor(parts: Parts, path: Path) -> None:
    model: Any = parts.model
    vision = model.config.vlm_config.vision_config
    size = vision.image_size
    parts.tokenizer.save_pretrained(path)
    processor = {
        "image_processor_type": "PI0ImageProcessor",
        "processor_class": "PI0Processor",
        "image_mean": list(parts.pixels.mean),
        "image_std": list(parts.pixels.std),
        "size": {"max_height": size, "max_width": size},
        "pad_size": {"height": size, "width": size},
        "image_seq_length": (size // vision.patch_size) ** 2,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def _pixels(path: Path) -> Pixels:
    """From the image processor's file; π0's own where it does not say."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            found = json.loads((path / name).read_text())
            found = found.get("image_processor", found)
            default = Pixels()
            return Pixels(tuple(found.get("image_mean", default.mean)), tuple(found.get("image_std", default.std)))
    return Pixels()
