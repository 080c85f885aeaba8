"""Loads a model's tokenizer, without torch where the folder allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


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


def _is_generic(folder: Path) -> bool:
    """Returns whether tokenizer.json says it all: AutoTokenizer, whose import loads torch, then has nothing to add."""
    config_file = folder / "tokenizer_config.json"
    if not config_file.exists() or not (folder / "tokenizer.json").exists():
        return False
    return json.loads(config_file.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES
