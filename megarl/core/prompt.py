"""A tokenized prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.arrays import HoldsArrays
from megarl.core.prompt_images import PromptImage, with_files


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(HoldsArrays):
    """One prompt, tokenized once: the engine reads these ids and the trainer trains on them.

    Attributes:
        id: unique within the data set, stable across runs with the same seed.
        text: the decoded `token_ids`, including special tokens, with one placeholder per image.
        token_ids: int32 [P]; any sequence is accepted. An image has as many placeholders as the vision tower has
            features for it.
        messages: the conversation that the prompt continues; each message has a role and content. The content is text
            or, in prompts with images, a list of parts: {"type": "text", "text": …} or {"type": "image"}.
        answer: the reference answer for reward functions; None if they need none.
        columns: the columns of the data row that reward functions require, as JSON values.
        images: the images in the prompt, in the order of their placeholders.
    """

    id: str
    text: str
    token_ids: NDArray[np.int32]
    answer: Any = None
    messages: tuple[Mapping[str, Any], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        self._freeze("token_ids", np.int32)

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def files(self) -> tuple[Any, ...]:
        """PromptImage.file of each image."""
        return tuple(image.file for image in self.images)

    def with_files(self, files: Sequence[Any]) -> Prompt:
        """Return the prompt with PromptImage.file set for each image. `files`: one value per image, in order."""
        return replace(self, images=with_files(self.images, files)) if self.images or files else self
