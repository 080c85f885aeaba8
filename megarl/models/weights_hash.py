"""The hash of a model's weights, by which a run knows that it goes on with the model that it started from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

WHOLE_BYTES = 64 * 2**20
"""The size of a file up to which all of it is read."""

BLOCK_BYTES, NUM_BLOCKS = 2**16, 64


def weights_hash(folder: Path) -> str:
    """Returns the SHA-256 of the names, sizes and contents of the folder's safetensors files.

    Of a file above 64 MiB only 64 blocks of 64 KiB are read, at even distances from its first byte, and with that its
    header, to its last one: models of a terabyte take seconds. Another training changes nearly every element, which the
    blocks show; a change of a few tensors between two blocks they do not.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        for block in _blocks(file, size):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    whole = size <= WHOLE_BYTES
    starts = (
        range(0, size, BLOCK_BYTES)
        if whole
        else (i * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS))
    )
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            yield stream.read(BLOCK_BYTES)
