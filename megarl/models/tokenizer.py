"""Load a model's tokenizer, without importing torch where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.core.files import read_foreign_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")

CONTEXT = 6
"""Number of prompt tokens that are decoded together with a response, because some tokenizers omit the leading space of
the first token that they decode."""

UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""Text that replaces an incomplete character, for example one whose last bytes were not sampled."""

MAX_CHARACTER_BYTES = 4
"""Maximum number of bytes in a UTF-8 character."""


@dataclass(frozen=True, slots=True)
class FixedDate:
    """Formats a fixed date in place of the current one. Chat templates call it as `strftime_now`."""

    day: str

    def __call__(self, format: str) -> str:
        return datetime.fromisoformat(self.day).strftime(format)


def load_tokenizer(folder: Path, key: str = "model.path", date: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer from a Hugging Face folder. Raise a UserError if the folder has no tokenizer, or if it cannot
    be loaded. The message contains the config key. `date` (data.date, YYYY-MM-DD) is the date that chat templates show
    instead of today's, because a resumed run must render the same prompts as before."""
    tokenizer = _load(folder, key)
    if date is not None:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=FixedDate(date))
    return tokenizer


def require_tokenizer(folder: Path, key: str = "model.path") -> None:
    """Raise a UserError if a Hugging Face folder has no tokenizer."""
    if not any(folder.glob("tokenizer*")):
        raise UserError(
            f"{key}={folder}: the folder has no tokenizer. Fix: copy the model's tokenizer files into the folder"
        )


def _load(folder: Path, key: str) -> PreTrainedTokenizerBase:
    require_tokenizer(folder, key)
    try:
        if _is_generic(folder):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        # By default, transformers asks on the terminal whether to execute the folder's code.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception for a corrupt file
        problem = f"cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())})"
        fix = "copy the model's tokenizer files again"
        if "trust_remote_code" in str(error):
            problem = "is Python code in the folder, which megarl does not execute"
            fix = "save the tokenizer as tokenizer.json"
        raise UserError(f"{key}={folder}: the tokenizer {problem}. Fix: {fix}") from error


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of token ids exactly as the tokenizer decodes it."""
    return tokenizer.decode(  # pyright: ignore[reportReturnType]  # a list only for a batch
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def load_decoder(folder: Path) -> Callable[[tuple[int, ...]], str]:
    """Return a function that decodes token ids, including special tokens. If the folder has a tokenizer.json, the
    tokenizers library is used directly, because importing it is a second faster than importing transformers."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        text_of = Tokenizer.from_file(str(folder / "tokenizer.json")).decode
    else:
        text_of = partial(decode, load_tokenizer(folder))
    return lru_cache(maxsize=2**16)(lambda ids: text_of(list(ids), skip_special_tokens=False))


def response_text(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
    """Return the text that the response adds to the prompt, without special tokens. An incomplete character at the end
    is dropped."""
    context = list(prompt_ids[-CONTEXT:])

    def text_of(ids: Sequence[int]) -> str:
        return decode(tokenizer, [*context, *ids], skip_special_tokens=True)

    start, full_text = len(text_of([])), text_of(response_ids)
    for incomplete in range(1, MAX_CHARACTER_BYTES):
        if not full_text.endswith(UNDECODED):
            break
        # Drop the tokens of the incomplete character. Otherwise, some tokenizers omit bytes that precede it as well.
        full_text = text_of(response_ids[: max(0, len(response_ids) - incomplete)])
    return full_text[start:].rstrip(UNDECODED)


def _is_generic(folder: Path) -> bool:
    """Return whether tokenizer.json fully defines the tokenizer, so that AutoTokenizer and torch are not needed."""
    config_file = folder / "tokenizer_config.json"
    if not config_file.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    return read_foreign_object(config_file).get("tokenizer_class") in GENERIC_CLASSES


def opening_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that starts a sequence. If the text already begins with the beginning-of-sequence
    token, the second one that the tokenizer adds is removed. An end-of-sequence token that the tokenizer adds is also
    removed, because the sequence continues."""
    ids: Any = tokenizer(text)["input_ids"]
    bos: Any = tokenizer.bos_token
    eos: Any = tokenizer.eos_token
    if bos is not None and text.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    is_closed = eos is not None and not text.endswith(eos) and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if is_closed else ids
