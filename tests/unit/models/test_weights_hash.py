"""Hash of a model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.models import weights_hash as module
from megarl.models.weights_hash import BLOCK_BYTES, NUM_BLOCKS, weights_hash


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_hash_depends_on_weights_only(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", b"weights"), write(tmp_path / "b", b"weights")
    (second / "config.json").write_text("{}")
    assert weights_hash(first) == weights_hash(second)
    for content, name in (
        (b"Weights", "model.safetensors"),
        (b"weights0", "model.safetensors"),
        (b"", "b.safetensors"),
    ):
        other = write(tmp_path / f"c{name}{len(content)}", b"weights")
        assert weights_hash(write(other, content, name)) != weights_hash(first)


def test_every_byte_of_a_small_file_is_hashed(tmp_path: Path) -> None:
    content = bytearray(3 * BLOCK_BYTES + 5)
    hashes = set()
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 7, len(content) - 1):
        content[place] ^= 1
        hashes.add(weights_hash(write(tmp_path / "model", bytes(content))))
    assert len(hashes) == 5


@pytest.mark.parametrize("place", [0, 8, -1], ids=["first", "header", "last"])
def test_first_and_last_blocks_of_a_large_file_are_hashed(tmp_path: Path, monkeypatch, place: int) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    content = bytearray(2 * NUM_BLOCKS * BLOCK_BYTES + 3)
    before = weights_hash(write(tmp_path / "model", bytes(content)))
    content[place] ^= 1
    assert weights_hash(write(tmp_path / "model", bytes(content))) != before


def test_large_file_is_hashed_in_part(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    content = bytearray(2 * NUM_BLOCKS * BLOCK_BYTES)
    before = weights_hash(write(tmp_path / "model", bytes(content)))
    content[BLOCK_BYTES + 1] ^= 1  # between the first two blocks
    assert weights_hash(write(tmp_path / "model", bytes(content))) == before
