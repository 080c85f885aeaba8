"""Rotary positions of tokens among images: in time, height and width (M-RoPE, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod

import numpy as np
from numpy.typing import NDArray

from megarl.core.prompt_images import PromptImage


def rotary_positions(num_tokens: int, images: Sequence[PromptImage]) -> NDArray[np.int64]:
    """Return each token's position in time, height and width, int64 [3, num_tokens].

    Text tokens advance all three positions by one, starting after the largest previous position. Tokens of an image
    share one time position; their height and width positions increase with row and column.

    Args:
        num_tokens: number of tokens in the prompt and response.
        images: the images among them, in the order of their placeholders.
    """
    positions = np.empty((3, num_tokens), np.int64)
    token = position = 0
    for image in images:
        position = _count_up(positions[:, token : image.start], position)
        rows, columns = feature_grid(image)
        index = np.arange(image.num_tokens)
        positions[:, image.start : image.stop] = position
        positions[1, image.start : image.stop] += index // columns
        positions[2, image.start : image.stop] += index % columns
        token, position = image.stop, position + max(rows, columns)
    _count_up(positions[:, token:], position)
    return positions


def feature_grid(image: PromptImage) -> tuple[int, int]:
    """Return the numbers of rows and columns of an image's features."""
    merge = isqrt(prod(image.grid) // image.num_tokens)
    _, height, width = image.grid
    return height // merge, width // merge


def _count_up(positions: NDArray[np.int64], first: int) -> int:
    """Fill consecutive text positions in place. Return the position after the last one."""
    stop = first + positions.shape[1]
    positions[:] = np.arange(first, stop)
    return stop
