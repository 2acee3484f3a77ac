"""Instructions as tokens: the tokenizer of a checkpoint, or one trained on the instructions of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from embodied.core.errors import UserError

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
IMAGE = "<image>"


def train_tokenizer(instructions: Sequence[str]) -> Any:
    """A word-level tokenizer whose vocabulary is the words of ``instructions``, in the order of the alphabet."""
    normalizer = normalizers.Lowercase()
    splitter = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]|\n"), behavior="removed", invert=True)
    words = {
        word for text in instructions for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text + "\n"))
    }
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), IMAGE, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, **SPECIAL, extra_special_tokens=[IMAGE])


def image_token_id(tokenizer: Any) -> int:
    """The id that stands for image features in a prompt, as PI0Processor finds it; UserError if there is none."""
    found = tokenizer.convert_tokens_to_ids(IMAGE)
    if found is None or found == tokenizer.unk_token_id:
        raise UserError(f"policy.pretrained: its tokenizer has no '{IMAGE}' token")
    return int(found)


def tokenize(tokenizer: Any, instructions: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids [I, T] of the prompts and which of them are real, bool [I, T]; T is the length of the longest.

    A prompt is ``<bos>``, the instruction and a newline, as π0 was trained. UserError for an instruction that is empty
    or has more than ``max_tokens`` tokens, and for words that the tokenizer does not know.
    """
    rows = []
    for text in instructions:
        if not text.strip():
            raise UserError("an instruction is empty: policy.vla needs words that say what to do")
        ids = tokenizer(f"{tokenizer.bos_token}{text}\n", add_special_tokens=False)["input_ids"]
        if len(ids) > max_tokens:
            raise UserError(
                f"instruction '{text}' has {len(ids)} tokens, policy.max_tokens allows {max_tokens}: shorten it"
            )
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise UserError(f"instruction '{text}' has words that the tokenizer of this policy does not know")
        rows.append(ids)
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id or 0, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        real[row, : len(ids)] = True
    return tokens, real
