"""Checkpoints in the layout of transformers: the model, the tokenizer, the image processor.

config.json  model.safetensors (or shards)  tokenizer.json, tokenizer_config.json  preprocessor_config.json
"""

import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from embodied.core.errors import UserError, one_line
from embodied.core.spec import EnvSpec
from embodied.policies.config import ARCHITECTURE, VLAConfig
from embodied.policies.vla.lora import merge_adaptations

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
IMAGE_TOKEN = "<image>"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
WEIGHTS = "weights (model.safetensors)"
REQUIRED_FILES = {
    "config.json": ("config.json",),
    WEIGHTS: ("model.safetensors", "model.safetensors.index.json"),
    "a tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model"),
    "an image processor (preprocessor_config.json)": PROCESSOR_FILES,
}
KINDS = {"vlm_config": "paligemma", "vlm_config.text_config": "gemma", "dit_config": "gemma"}
"""Networks whose forward passes are those of pi0.py, by their place in config.json."""
ABSENT = "absent"
MAX_LISTED = 12  # file names in an error
LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError, StrictDataclassError,
)  # fmt: skip

if not sys.stderr.isatty():  # progress bars of loading belong on a terminal, not in a log
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class Pixels(NamedTuple):
    """Mean and standard deviation of each colour of images with pixels in [0, 1]; by default those of π0."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class Parts(NamedTuple):
    """Contents of a checkpoint: a PI0ForConditionalGeneration and the tokenizer of its instructions."""

    model: Any
    tokenizer: Any
    pixels: Pixels


def build(spec: EnvSpec, config: VLAConfig) -> Parts:
    """Load the checkpoint ``config.pretrained``, or build a fresh model if there is none.

    The tokenizer of a fresh model is trained on the task's instructions. Weights are random, drawn without a change of
    torch's generator, if ``config.pretrained`` ends with ARCHITECTURE. UserError if something is missing or does not
    fit.
    """
    if config.pretrained is None:
        return _build_fresh(spec, config)
    given = Path(config.pretrained)
    path = given.parent if given.name == ARCHITECTURE else given
    missing = [what for what, names in REQUIRED_FILES.items() if not any((path / name).is_file() for name in names)]
    if path != given:
        missing = [what for what in missing if what != WEIGHTS]
    elif WEIGHTS in missing and (path / ARCHITECTURE).is_file():
        cure = f"those of its run are in its checkpoints; init={path.parent} takes them"
        raise UserError(f"policy.pretrained={path} has no weights: {cure}")
    if missing:
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else ["no such directory"]
        names[MAX_LISTED:] = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
        there = ", ".join(names) or "nothing"
        raise UserError(f"policy.pretrained={path} lacks {'; '.join(missing)}. It has: {there}")
    with _loading_errors(path):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _check_kinds(json.loads((path / "config.json").read_text(encoding="utf-8")))
        model_config = PI0Config.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        pixels = _pixels(path)
        index = path / "model.safetensors.index.json"
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    for key, (wanted, there) in _differences(config.model, model_config.to_dict()).items():
        raise UserError(f"policy.model.{key}={wanted} does not fit policy.pretrained={path}, where it is {there}")
    for name in shards:  # transformers would read files elsewhere
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index} names {one_line(name)}: shards are *.safetensors files in the same directory")
    with _loading_errors(path):
        if path != given:
            with torch.random.fork_rng(devices=[]):
                return Parts(PI0ForConditionalGeneration(model_config), tokenizer, pixels)
        loaded: Any = PI0ForConditionalGeneration.from_pretrained(
            path, config=model_config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    for name, there, needed in sorted(loaded[1]["mismatched_keys"]):
        shapes = f"{name} is {[*there]}, config.json needs {[*needed]}"
        raise UserError(f"policy.pretrained={path}: {shapes}")
    model, lacking = loaded[0], loaded[1]["missing_keys"]
    if lacking:
        some = ", ".join(sorted(lacking)[:3])
        raise UserError(f"policy.pretrained={path} lacks {len(lacking)} of the model's weights, for instance {some}")
    return Parts(model, tokenizer, pixels)


@contextmanager
def _loading_errors(path: Path) -> Iterator[None]:
    """Turn an error while a checkpoint is loaded into a UserError that names the checkpoint."""
    try:
        yield
    except LOADING_ERRORS as error:
        raise UserError(f"policy.pretrained={path} cannot be loaded: {one_line(error)}") from error


def _build_fresh(spec: EnvSpec, config: VLAConfig) -> Parts:
    """Build a model with random weights and the sizes in ``config.model``. UserError if it has none."""
    if not config.model:
        give = "give policy.pretrained=<directory of a checkpoint of π0> or init=<run directory>"
        raise UserError(f"policy=vla needs a trained model: {give}; policy=vla_tiny starts with a fresh one")
    unknown = [key for key, (_, has) in _differences(config.model, PI0Config().to_dict()).items() if has is ABSENT]
    if unknown:
        raise UserError(f"unknown key 'policy.model.{unknown[0]}': PI0Config of transformers has no such entry")
    tokenizer = train_tokenizer(spec.texts)
    arguments = config.architecture(spec.action_dim, len(tokenizer), image_token_id(tokenizer), tokenizer.pad_token_id)
    try:
        _check_kinds(arguments)
        model_config = PI0Config(**arguments)
    except LOADING_ERRORS as error:
        raise UserError(f"policy.model: {error}") from error
    return Parts(PI0ForConditionalGeneration(model_config), tokenizer, Pixels())


def _check_kinds(config: Mapping[str, Any]) -> None:
    """Raise UserError if a network of a PI0Config in plain values is not of its kind in KINDS."""
    for name, allowed in KINDS.items():
        part: Any = config
        for key in name.split("."):
            part = part.get(key) or {}
        got = part.get("model_type", allowed)
        if got != allowed:
            raise UserError(f"{name}.model_type: got {one_line(got)}, allowed: {allowed}")


def _differences(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries of ``wanted`` that differ in ``there``: both values by the dotted name.

    The second value is ABSENT if ``there`` lacks the entry.
    """
    differences: dict[str, tuple[Any, Any]] = {}
    for key, value in wanted.items():
        has = there.get(key, ABSENT)
        if isinstance(value, Mapping) and isinstance(has, Mapping):
            differences |= {f"{key}.{inner}": both for inner, both in _differences(value, has).items()}
        elif value != has:
            differences[key] = (value, has)
    return differences


def check_fits(parts: Parts, spec: EnvSpec, config: VLAConfig) -> None:
    """Raise UserError unless the model fits the task's state, actions and cameras and the policy's sizes."""
    model = parts.model.config
    vision, text, expert = model.vlm_config.vision_config, model.vlm_config.text_config, model.dit_config
    size, patch, projected = config.image_size, vision.patch_size, model.vlm_config.projection_dim
    for key, got, expected in (("horizon", config.horizon, model.chunk_size), ("image_size", size, vision.image_size)):
        if got != expected:
            raise UserError(f"policy.{key}={got} does not fit the model, which was made for {expected}")
    if size % patch:
        raise UserError(f"policy.image_size={size} must be a multiple of the model's patches, {patch} pixels")
    limits = {"state": (spec.state_dim, model.max_state_dim), "action": (spec.action_dim, model.max_action_dim)}
    for what, (entries, most) in limits.items():
        if entries > most:
            raise UserError(f"the {what} of task {spec.task} has {entries} entries, the model takes {most} at most")
    if projected != text.hidden_size:
        sizes = f"vlm_config.projection_dim (images) is {projected}, text_config.hidden_size (words) {text.hidden_size}"
        raise UserError(f"policy.model: {sizes}: they must be equal")
    for name, part in (("text_config", text), ("dit_config", expert)):
        heads, groups = part.num_attention_heads, part.num_key_value_heads
        if heads % groups:
            wrong = f"{name}.num_attention_heads, {heads}, must be a multiple of key-value heads, {groups}"
            raise UserError(f"policy.model: {wrong}")
    for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        own, its = getattr(expert, key), getattr(text, key)
        if own != its:  # each layer of the expert attends to the same layer of the language model
            raise UserError(f"policy.model: {key} is {own} in dit_config, {its} in text_config: they must be equal")
    seen = {camera.name: f"{camera.height}x{camera.width}" for camera in spec.cameras}
    for name in config.cameras:
        if seen.get(name) != f"{size}x{size}":
            has = ", ".join(f"{camera} {pixels}" for camera, pixels in seen.items()) or "none"
            raise UserError(f"policy.cameras: the policy needs '{name}' at {size}x{size}; this environment has: {has}")


def save_architecture(parts: Parts, path: Path) -> None:
    """Write a checkpoint without weights, for a run that keeps these in its own checkpoints; remove older weights."""
    path.mkdir(parents=True, exist_ok=True)
    for weights in path.glob("model*.safetensors*"):
        weights.unlink()
    parts.model.config.save_pretrained(path)
    _save_processor(parts, path)
    (path / ARCHITECTURE).touch()


def save_pretrained(parts: Parts, path: Path) -> None:
    """Write a checkpoint that transformers loads: LoRA is merged into the weights, all of which are float32."""
    path.mkdir(parents=True, exist_ok=True)
    weights = parts.model.parameters()  # copied one by one: a GPU that trains them may have no room for another model
    copies = {id(weight): nn.Parameter(weight.detach().to("cpu", torch.float32, copy=True)) for weight in weights}
    merge_adaptations(copy.deepcopy(parts.model, copies).to("cpu", torch.float32)).save_pretrained(path)
    _save_processor(parts, path)
    (path / ARCHITECTURE).unlink(missing_ok=True)


def _save_processor(parts: Parts, path: Path) -> None:
    """Write the files of the tokenizer and of the image processor."""
    parts.tokenizer.save_pretrained(path)
    vision = parts.model.config.vlm_config.vision_config
    size = vision.image_size
    processor = {
        "image_processor_type": "PI0ImageProcessor", "processor_class": "PI0Processor",
        "image_mean": list(parts.pixels.mean), "image_std": list(parts.pixels.std),
        "size": {"max_height": size, "max_width": size}, "pad_size": {"height": size, "width": size},
        "image_seq_length": (size // vision.patch_size) ** 2,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")


def _pixels(path: Path) -> Pixels:
    """Read what the image processor of transformers does with pixels. UserError for numbers that are none."""
    files = [path / name for name in PROCESSOR_FILES if (path / name).is_file()]
    found = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    nested = found.get("processor_config.json", {}).get("image_processor")
    processor = found["preprocessor_config.json"] if nested is None else nested

    def colours(key: str, default: float) -> Tensor:
        value = processor.get(key, default)
        try:
            return torch.tensor(value, dtype=torch.float64).expand(3)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{key}: got {value!r}, allowed: a number, or three of them") from error

    scale, mean, std = torch.tensor(255.0), torch.zeros(3), torch.ones(3)
    if processor.get("do_rescale", True):
        scale = 255.0 * colours("rescale_factor", 1 / 255)
    if processor.get("do_normalize", True):
        mean, std = colours("image_mean", 0.5), colours("image_std", 0.5)
    return Pixels(tuple((mean / scale).tolist()), tuple((std / scale).tolist()))


def train_tokenizer(instructions: Sequence[str]) -> Any:
    """Train a word-level tokenizer whose vocabulary is the words of ``instructions``, sorted."""
    normalizer = normalizers.Lowercase()
    splitter = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]|\n"), behavior="removed", invert=True)
    text = normalizer.normalize_str("".join(f"{instruction}\n" for instruction in instructions))
    words = {word for word, _ in splitter.pre_tokenize_str(text)}
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS.values(), IMAGE_TOKEN, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, **SPECIAL_TOKENS, extra_special_tokens=[IMAGE_TOKEN])


def image_token_id(tokenizer: Any) -> int:
    """Return the id that stands for image features in a prompt of PI0Processor. UserError if there is none."""
    token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise UserError(f"policy.pretrained: its tokenizer has no '{IMAGE_TOKEN}' token")
    return int(token_id)


def tokenize(tokenizer: Any, instructions: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Return token ids of the prompts and the mask of those that are no padding, bool, [I, T] each.

    A prompt is ``<bos>``, the instruction and a newline, as in the training of π0. T is the length of the longest
    prompt. UserError for an instruction that is empty or has more than ``max_tokens`` tokens, and for words outside the
    tokenizer's vocabulary.
    """
    rows: list[Tensor] = []
    for text in instructions:
        if not text.strip():
            raise UserError("an instruction is empty: policy=vla needs words that say what to do")
        ids = tokenizer(f"{tokenizer.bos_token}{text}\n", add_special_tokens=False)["input_ids"]
        if len(ids) > max_tokens:
            raise UserError(f"instruction '{text}' has {len(ids)} tokens, policy.max_tokens allows {max_tokens}")
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise UserError(f"instruction '{text}' has words outside the vocabulary of the policy's tokenizer")
        rows.append(torch.tensor(ids))
    tokens = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    return tokens, torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
