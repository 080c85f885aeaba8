"""Empty the device code for other GPU architectures in a shared library, so that it compresses well.

python slim.py LIBRARY --keep 90 --empty EMPTY.cubin

CUDA finds device code in containers, which have an entry per architecture. An emptied entry keeps its place, header and
size. Its payload becomes a cubin without code, followed by zeros, so cuobjdump can still read it. The format of the
containers is not documented; this script supports the output of nvcc 13.0.
"""

from __future__ import annotations

import argparse
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Magic number, version, header size, and size of all entries."""
ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
"""Kind, version, header size, payload size with padding, compressed size, offset of options, minor and major version,
architecture, offset and size of the name, flags, zero, and decompressed size."""
CUBIN, IS_ZSTD = 2, 0x8000
COMPRESSED_AT, DECOMPRESSED_AT = 16, 56
"""Offsets of the compressed and decompressed sizes in an entry's header."""


class Entry(NamedTuple):
    kind: int
    arch: int
    flags: int
    header: int
    payload: int
    size: int
    compressed: int


def section(library: mmap.mmap, wanted: str) -> tuple[int, int]:
    """Return the offset and size of a section in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        if library[start : library.find(b"\0", start)].decode() == wanted:
            return header[4], header[5]
    raise SystemExit(f"the library has no section {wanted}")


def containers(library: mmap.mmap, start: int, size: int) -> Iterator[list[Entry]]:
    at = start
    while at < start + size:
        magic, _, header, total = CONTAINER.unpack_from(library, at)
        if magic == 0:  # padding between containers
            at += 4
            continue
        assert magic == MAGIC, f"unknown magic number {magic:#x} at {at:#x}"
        entries, here, end = [], at + header, at + header + total
        while here < end:
            kind, _, own, padded, compressed, *_, arch, _, _, flags, _, _ = ENTRY.unpack_from(library, here)
            entries.append(Entry(kind, arch, flags, here, here + own, padded, compressed))
            here += own + padded
        assert here == end, f"the entries at {at:#x} do not fill their container"
        yield entries
        at = end


def empty(library: mmap.mmap, entry: Entry, cubin: bytes) -> bool:
    """Replace an entry's payload with an empty cubin for its architecture. Return whether there was room for it."""
    assert entry.kind == CUBIN, "only cubins can be emptied"
    original, sizes = bytes(library[entry.payload : entry.payload + entry.size]), (0, 0)
    if entry.flags & IS_ZSTD:
        original = zstandard.ZstdDecompressor().decompressobj().decompress(original[: entry.compressed])
    stub = bytearray(cubin)
    for same in (slice(7, 16), slice(20, 24), slice(48, 52)):  # ABI, version, and the flags that name the architecture
        stub[same] = original[same]
    payload = bytes(stub)
    if entry.flags & IS_ZSTD:
        payload = zstandard.ZstdCompressor(level=19).compress(payload)
        sizes = len(payload), len(stub)
    if len(payload) > entry.size:
        return False
    struct.pack_into("<I", library, entry.header + COMPRESSED_AT, sizes[0])
    struct.pack_into("<Q", library, entry.header + DECOMPRESSED_AT, sizes[1])
    library[entry.payload : entry.payload + entry.size] = payload.ljust(entry.size, b"\0")
    return True


def slim(path: Path, keep: int, cubin: bytes) -> int:
    """Empty all entries for other architectures in containers that have code for `keep`. Return the bytes emptied."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as library:
        return sum(
            entry.size
            for entries in list(containers(library, *section(library, ".nv_fatbin")))
            if any(entry.arch == keep for entry in entries)
            for entry in entries
            if entry.arch != keep and empty(library, entry, cubin)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--keep", type=int, required=True, help="architecture whose code is kept, such as 90")
    parser.add_argument("--empty", type=Path, required=True, help="cubin without code, made by ptxas")
    arguments = parser.parse_args()
    emptied = slim(arguments.library, arguments.keep, arguments.empty.read_bytes())
    print(f"{arguments.library}: emptied {emptied / 2**20:.0f} MiB of device code")


if __name__ == "__main__":
    main()
