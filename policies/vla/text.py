"""Tokens of instructions, by the tokenizer of a checkpoint or by one trained on the instructions of a task."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from embodied.core.errors import UserError

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
IMAGE_TOKEN = "<image>"


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
    rows = []
    for text in instructions:
        if not text.strip():
            raise UserError("an instruction is empty: policy=vla needs words that say what to do")
        ids = tokenizer(f"{tokenizer.bos_token}{text}\n", add_special_tokens=False)["input_ids"]
        if len(ids) > max_tokens:
            raise UserError(f"instruction '{text}' has {len(ids)} tokens, policy.max_tokens allows {max_tokens}")
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise UserError(f"instruction '{text}' has words outside the vocabulary of the policy's tokenizer")
        rows.append(ids)
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id or 0, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        real[row, : len(ids)] = True
    return tokens, real
