"""Images among the tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image in a prompt. Its tokens are consecutive placeholders, whose embeddings the vision tower's features
    replace.

    Attributes:
        start: index of the first placeholder among the token ids of prompt and response. In conversations, images may
            follow the prompt.
        num_tokens: number of placeholders.
        grid: numbers of patches in time (1), height and width.
        digest: SHA-256 of the encoded image.
        file: the encoded image, such as a PNG file: bytes in an engine or a rank; a reference to bytes in Ray's object
            store in a request on the driver; None in data and in stored samples (SampleRef has the references).
    """

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    digest: str
    file: Any = None

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens
