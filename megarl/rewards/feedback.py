"""Prompts for teachers with feedback on samples (SDPO, https://arxiv.org/abs/2601.20802).

The feedback comes from reward functions and from the environment. It may quote the policy's response, so special tokens
in it are tokenized as ordinary text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megarl.config.data_schema import Data
from megarl.config.model_schema import Teacher
from megarl.core.errors import UserError
from megarl.core.latents import AnySample
from megarl.core.sample import Sample
from megarl.core.score import ENVIRONMENT
from megarl.data.chat import prompt_ids
from megarl.data.typed_tokens import typed_tokens
from megarl.models.families import completed
from megarl.models.folder import read_config
from megarl.models.tokenizer import load_tokenizer
from megarl.rewards.result import Result
from megarl.usercode.feedback import join_feedback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def feedback_on(sample: AnySample, results: Mapping[str, Result]) -> dict[str, str]:
    """Return the feedback on a sample by source, without empty texts: that of its rollout's environment, unless the
    rollout failed, and that of reward functions. `results`: the functions' results for the rollout, by name."""
    texts = {name: result.feedback for name, result in results.items()}
    if sample.episode is not None and sample.episode.failure is None:
        texts[ENVIRONMENT] = sample.episode.feedback
    return {name: text for name, text in texts.items() if text}


class FeedbackPrompts:
    """Collects prompts with feedback on their samples until `take` is called.

    Args:
        teachers: the teachers, of which those with `feedback` see prompts with feedback.
        folder: the actor's model folder, which contains the tokenizer.
    """

    def __init__(self, teachers: Sequence[Teacher], data: Data, folder: Path):
        self._sources = {teacher.name: teacher.feedback for teacher in teachers if teacher.feedback is not None}
        self._data, self._folder = data, folder
        self._prompts: dict[str, dict[str, NDArray[np.int32]]] = {}

    def note(self, samples: Sequence[Sample], feedback: Mapping[str, Mapping[str, str]]) -> None:
        """Add the feedback on each sample to the last message of its prompt. Skip samples without feedback, samples
        whose prompt does not permit it, and prompts with tokens that the model does not embed. `feedback`: sample id ->
        source -> text."""
        for teacher, sources in self._sources.items():
            for sample in samples:
                text = join_feedback(feedback[sample.id].get(name, "") for name in sources)
                ids = self._with_feedback(sample, f"\n\n{text}") if text else None
                if ids is not None and max(ids) < self._vocab_size:
                    self._prompts.setdefault(teacher, {})[sample.id] = np.array(ids, np.int32)

    def take(self) -> dict[str, dict[str, NDArray[np.int32]]]:
        """Return the prompts, int32 [P], by teacher and sample id."""
        taken, self._prompts = self._prompts, {}
        return taken

    def _with_feedback(self, sample: Sample, text: str) -> list[int] | None:
        """Return the ids of the prompt with the text at the end of its last message; None if the end is unknown, or the
        chat template rejects the text."""
        ids, typed = sample.prompt.token_ids.tolist(), typed_tokens(self._tokenizer)
        if sample.episode is not None:
            end = sample.episode.message_end
            return None if end is None else [*ids[:end], *typed.ids(typed.mark(text)), *ids[end:]]
        if not self._data.chat_template:
            return ids + typed.ids(typed.mark(text))
        *others, last = sample.prompt.messages
        messages = [*map(dict, others), {**last, "content": f"{last['content']}{text}"}]
        with suppress(UserError):
            return prompt_ids(self._tokenizer, messages, True, f"sample {sample.id}")
        return None

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._folder, date=self._data.date)

    @cached_property
    def _vocab_size(self) -> int:
        return completed(read_config(self._folder))["vocab_size"]
