"""Teacher prompts that contain feedback on the samples (SDPO, https://arxiv.org/abs/2601.20802).

The feedback comes from reward functions and from the environment. It may quote the policy's response, so special tokens
in it are tokenized as ordinary text.
"""

from __future__ import annotations

from collections import defaultdict
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
from megarl.models.folder import vocab_size
from megarl.models.tokenizer import load_tokenizer
from megarl.rewards.result import Result
from megarl.usercode.feedback import join_feedback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sources = tuple[str, ...]
"""Names of reward functions, or ENVIRONMENT, in the order in which a teacher sees their feedback."""


def feedback_on(sample: AnySample, results: Mapping[str, Result]) -> dict[str, str]:
    """Return a sample's feedback by source, without empty texts: from reward functions, and from the environment unless
    the rollout failed. `results`: the functions' results for the rollout, by name."""
    texts = {name: result.feedback for name, result in results.items()}
    if sample.episode is not None and sample.episode.failure is None:
        texts[ENVIRONMENT] = sample.episode.feedback
    return {name: text for name, text in texts.items() if text}


class FeedbackPrompts:
    """Collects prompts extended with feedback on their samples until `take` is called.

    Args:
        teachers: all teachers; those without `feedback` are ignored.
        folder: the actor's model folder, which contains the tokenizer.
    """

    def __init__(self, teachers: Sequence[Teacher], data: Data, folder: Path):
        self._sources = {teacher.name: tuple(teacher.feedback) for teacher in teachers if teacher.feedback is not None}
        self._data, self._folder = data, folder
        self._prompts: dict[Sources, dict[str, NDArray[np.int32] | None]] = defaultdict(dict)
        """Prompts of samples with feedback, by sample id; None for prompts that cannot be extended."""
        self._has_warned = False

    def note(self, samples: Sequence[Sample], feedback: Mapping[str, Mapping[str, str]]) -> None:
        """Append each sample's feedback to the last message of its prompt. Skip samples without feedback, samples whose
        prompt cannot be extended, and prompts with tokens that have no embedding in the model. `feedback`: sample id ->
        source -> text."""
        for sources in dict.fromkeys(self._sources.values()):
            for sample in samples:
                text = join_feedback(feedback[sample.id].get(name, "") for name in sources)
                if text:
                    ids = self._with_feedback(sample, f"\n\n{text}")
                    is_embedded = ids is not None and max(ids) < self._vocab_size
                    self._prompts[sources][sample.id] = np.array(ids, np.int32) if is_embedded else None

    def take(self) -> dict[str, dict[str, NDArray[np.int32]]]:
        """Remove and return the prompts that `note` has extended, int32 [P], by teacher and sample id. Warn once if a
        teacher's prompts have feedback but none of them could be extended."""
        taken = {}
        for teacher, sources in self._sources.items():
            prompts = self._prompts.get(sources, {})
            taken[teacher] = {name: ids for name, ids in prompts.items() if ids is not None}
            if prompts and not taken[teacher] and not self._has_warned:
                self._has_warned = True
                print(
                    f"megarl: warning: teachers.models: {teacher} with feedback=[{', '.join(sources)}]: none of the "
                    f"{len(prompts)} prompts of this step could be extended with their feedback, so the teacher scores "
                    "no samples. Possible reasons: see Feedback in docs/guide/distillation.md",
                    flush=True,
                )
        self._prompts.clear()
        return {teacher: prompts for teacher, prompts in taken.items() if prompts}

    def _with_feedback(self, sample: Sample, text: str) -> list[int] | None:
        """Return the prompt's token ids with the text appended to its last message, or None if the end of the message
        is unknown or the chat template rejects the text."""
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
        return vocab_size(self._folder)
