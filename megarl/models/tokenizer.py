"""Loads a model's tokenizer, without torch where the folder allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")

CONTEXT = 6
"""The tokens of the prompt before a response that tell how its text begins: some tokenizers give the first token of a
text no space."""

UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are no character, such as the first of one whose others have not been sampled."""

MOST_BYTES = 4
"""The bytes of a character in UTF-8, at most."""


def load_tokenizer(folder: Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face folder, which was given for the config key `key`. Raises UserError if the
    folder holds none."""
    if not any(folder.glob("tokenizer*")):
        raise UserError(f"{key}: {folder} has no tokenizer; copy the model's tokenizer files into it")
    if _is_generic(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def load_decoder(folder: Path) -> Callable[[tuple[int, ...]], str]:
    """Returns a function that decodes ids, special tokens included, of a folder that has a tokenizer: by the library
    below transformers, which takes a second less to import, where tokenizer.json says it all."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        decode = partial(Tokenizer.from_file(str(folder / "tokenizer.json")).decode, skip_special_tokens=False)
    else:
        decode = partial(load_tokenizer(folder).decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return lru_cache(maxsize=2**16)(lambda ids: decode(list(ids)))


def response_text(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
    """Returns what the response adds to the prompt's text, without special tokens, nor an incomplete character at its
    end."""
    context = list(prompt_ids[-CONTEXT:])

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([*context, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    start, whole = len(decode([])), decode(response_ids)
    for incomplete in range(1, MOST_BYTES):
        if not whole.endswith(UNDECODED):
            break
        # Without what is incomplete: some tokenizers show no byte before it, either.
        whole = decode(response_ids[: max(0, len(response_ids) - incomplete)])
    return whole[start:].rstrip(UNDECODED)


def _is_generic(folder: Path) -> bool:
    """Returns whether tokenizer.json says it all: AutoTokenizer, whose import loads torch, then has nothing to add."""
    config_file = folder / "tokenizer_config.json"
    if not config_file.exists() or not (folder / "tokenizer.json").exists():
        return False
    return json.loads(config_file.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES
