"""Prompts for teachers with feedback from reward functions (SDPO, https://arxiv.org/abs/2601.20802)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megarl.config.data_schema import Data
from megarl.core.errors import UserError
from megarl.core.sample import Sample
from megarl.data.chat import prompt_ids
from megarl.data.typed_tokens import typed_tokens
from megarl.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FeedbackPrompts:
    """Collects prompts with feedback on their samples until `take` is called.

    Args:
        functions: the reward functions whose feedback teachers see.
        folder: the actor's model folder, which contains the tokenizer.
    """

    def __init__(self, functions: Collection[str], data: Data, folder: Path):
        self._functions, self._data, self._folder = functions, data, folder
        self._prompts: dict[str, dict[str, NDArray[np.int32]]] = {}

    def note(self, samples: Sequence[Sample], feedback: Mapping[str, Mapping[str, str]]) -> None:
        """Add the feedback on each sample to the last message of its prompt. `feedback`: sample id -> function -> text;
        empty texts, and those that the chat template rejects, are skipped."""
        for name in self._functions:
            for sample in samples:
                text = feedback[sample.id].get(name)
                with suppress(UserError):
                    if text:
                        ids = self._with_feedback(sample, f"\n\n{text}")
                        self._prompts.setdefault(name, {})[sample.id] = np.array(ids, np.int32)

    def take(self) -> dict[str, dict[str, NDArray[np.int32]]]:
        """Return the prompts, int32 [P], by function and sample id."""
        taken, self._prompts = self._prompts, {}
        return taken

    def _with_feedback(self, sample: Sample, text: str) -> list[int]:
        """Return the ids of the prompt with the text at its end. The text may quote the response, so it cannot contain
        special tokens."""
        *others, last = sample.prompt.messages
        if self._data.chat_template:
            messages = [*map(dict, others), {**last, "content": f"{last['content']}{text}"}]
            return prompt_ids(self._tokenizer, messages, True, f"sample {sample.id}")
        typed = typed_tokens(self._tokenizer)
        return sample.prompt.token_ids.tolist() + typed.ids(typed.mark(text))

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._folder, date=self._data.date)
