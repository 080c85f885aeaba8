"""Images in prompts and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image that the policy receives. Its tokens are consecutive placeholders. The vision tower's features replace
    their embeddings.

    Attributes:
        start: index of the first placeholder among the token ids of prompt and response.
        num_tokens: number of placeholders.
        grid: numbers of patches in time (1), height and width.
        digest: SHA-256 of the encoded image.
        file: the encoded image, such as a PNG file: its bytes in an engine or a rank; a reference to the bytes in Ray's
            object store in a request on the driver; None in data and in stored samples (SampleRef has the references).
    """

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    digest: str
    file: Any = None

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def with_files(images: Sequence[PromptImage], files: Sequence[Any]) -> tuple[PromptImage, ...]:
    """Set PromptImage.file of each image."""
    return tuple(replace(image, file=file) for image, file in zip(images, files, strict=True))


def expand(
    token_ids: Sequence[int], token: int, images: Sequence[PromptImage]
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Expand each placeholder to one per feature. Return the ids and the images with their starts set.

    Args:
        token_ids: ids with one placeholder `token` per image.
    """
    expanded: list[int] = []
    placed: list[PromptImage] = []
    for number in token_ids:
        if number == token:
            placed.append(replace(images[len(placed)], start=len(expanded)))
            expanded += [token] * placed[-1].num_tokens
        else:
            expanded.append(number)
    assert len(placed) == len(images), f"{len(placed)} placeholders for {len(images)} images"
    return expanded, tuple(placed)
