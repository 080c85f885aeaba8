"""Hash a model's weights, so that a resumed run can recognize its initial model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

WHOLE_BYTES = 64 * 2**20
"""Maximum size in bytes of a file that is hashed completely."""

BLOCK_BYTES, NUM_BLOCKS = 2**16, 64


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of the names, sizes and contents of the folder's safetensors files.

    For a file above 64 MiB, only 64 evenly spaced blocks of 64 KiB are read, so hashing a 1 TB model takes seconds. The
    blocks include the first and last bytes, and therefore the header. Training changes nearly every element, so the
    blocks change. A change to a few tensors between two blocks is not detected.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        for block in _blocks(file, size):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    is_small = size <= WHOLE_BYTES
    starts = (
        range(0, size, BLOCK_BYTES)
        if is_small
        else (i * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS))
    )
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            yield stream.read(BLOCK_BYTES)
