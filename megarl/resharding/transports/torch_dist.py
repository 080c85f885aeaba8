"""Read a torch.distributed.checkpoint folder as a source, through memory-mapped files."""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megarl.core.errors import UserError
from megarl.resharding.checkpoint import Extent
from megarl.resharding.piece import Rectangle, intersect, moved, num_elements, shape_of, whole
from megarl.resharding.transports.transport import Readable, dtype_name, view

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checkpoint tensor and the rectangles in which it is stored."""

    shape: tuple[int, ...]
    dtype: str
    rectangles: tuple[Rectangle, ...]


class TorchDistFolder:
    """A checkpoint folder, as a context manager that unmaps its files on exit. Tensors are views of these files."""

    def __init__(self, folder: Path):
        """Raise a UserError if the folder is not a torch_dist checkpoint, or if a file is missing or truncated."""
        self._folder = folder
        metadata = _metadata(folder)
        self._items: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()
        }
        entries = metadata.state_dict_metadata
        self.tensors = {key: _stored(e) for key, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        self.objects = frozenset(key for key, e in entries.items() if isinstance(e, BytesStorageMetadata))
        self._check_files()
        self._stack = ExitStack()
        self._maps: dict[str, mmap.mmap] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}

    def __enter__(self) -> TorchDistFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.clear()
        self._maps.clear()  # a file is unmapped when the last view of it is freed
        self._stack.close()

    @property
    def files(self) -> dict[str, int]:
        """The files with stored data: file name -> size in bytes."""
        names = {info.relative_path for info in self._items.values()}
        return {name: (self._folder / name).stat().st_size for name in sorted(names)}

    def read(self, key: str, place: Rectangle) -> torch.Tensor:
        """Return a rectangle of a tensor: a view if one stored rectangle contains it, otherwise a copy of the parts.
        Raise a UserError if the checkpoint does not contain all of it."""
        stored = self.tensors[key]
        parts = [(r, common) for r in stored.rectangles if (common := intersect(r, place)) is not None]
        if sum(num_elements(common) for _, common in parts) != num_elements(place):
            raise UserError(
                f"{self._folder}: the checkpoint does not contain all of {key} at {place}. Fix: copy the folder again"
            )
        if len(parts) == 1:
            return self._part(key, *parts[0])
        values = torch.empty(shape_of(place), dtype=getattr(torch, stored.dtype))
        for rectangle, common in parts:
            view(values, moved(common, place, whole(shape_of(place)))).copy_(self._part(key, rectangle, common))
        return values

    def read_object(self, key: str) -> Any:
        """Return a non-tensor entry. Raise a UserError if it contains anything but tensors and plain values."""
        info = self._items[key, ()]
        with self._loading(key, info.relative_path):
            window = Window(self._map(info.relative_path), info.offset, info.length)
            return torch.load(io.BufferedReader(window), weights_only=True)

    def _check_files(self) -> None:
        """Raise a UserError for missing or truncated files: reading past the end of a mapped file kills the process."""
        ends: dict[str, int] = {}
        for info in self._items.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self._folder / name
            if not file.is_file():
                raise UserError(
                    f"{self._folder}: {METADATA} lists {name}, but the file does not exist. Fix: copy the file again"
                )
            if (size := file.stat().st_size) < end:
                raise UserError(
                    f"{self._folder}: {name} is truncated: it has {size:,} of {end:,} bytes. Fix: copy the file again"
                )

    def _part(self, key: str, rectangle: Rectangle, place: Rectangle) -> torch.Tensor:
        """Return the elements at `place` from the chunk that stores `rectangle`."""
        chunk = self._chunk(key, rectangle)
        part = view(chunk.elements, moved(place, rectangle, whole(shape_of(rectangle))))
        first = chunk.start + int(part.storage_offset()) * part.itemsize
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
        start = first - first % mmap.PAGESIZE
        # Prefetch the range in large blocks, instead of one page per fault.
        chunk.data.madvise(mmap.MADV_WILLNEED, start, first - start + last * part.itemsize)
        return part

    def _chunk(self, key: str, rectangle: Rectangle) -> Chunk:
        index = key, tuple(start for start, _ in rectangle)
        if index not in self._chunks:
            info = self._items[index]
            with self._loading(key, info.relative_path):
                chunk = _mapped(self._map(info.relative_path), info.offset, info.length)
            stored = tuple(chunk.elements.shape), dtype_name(chunk.elements.dtype)
            if stored != (shape_of(rectangle), self.tensors[key].dtype):
                raise UserError(
                    f"{self._folder}: {info.relative_path} is corrupt: {key} is {stored}, but {METADATA} lists "
                    f"{(shape_of(rectangle), self.tensors[key].dtype)}. Fix: copy the checkpoint again, or use another "
                    "one"
                )
            self._chunks[index] = chunk
        return self._chunks[index]

    @contextmanager
    def _loading(self, key: str, name: str) -> Iterator[None]:
        """Raise a UserError that names the file if the value of a key cannot be loaded from it."""
        try:
            yield
        except (OSError, MemoryError):  # not caused by the file's content
            raise
        except Exception as error:  # a malicious pickle may raise any exception
            # Omit torch's message, which advises loading the file with weights_only=False and thus running its code.
            raise UserError(
                f"{self._folder}: {name} is corrupt: {key} cannot be loaded ({type(error).__name__}). Fix: copy the "
                "checkpoint again, or use another one"
            ) from error

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            file = self._stack.enter_context((self._folder / name).open("rb"))
            # torch requires writable memory, so the mapping is copy-on-write; it is never written to.
            self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[name]


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A stored rectangle of a tensor in a mapped file. `start` is the byte offset of its storage in the file."""

    data: mmap.mmap
    start: int
    elements: torch.Tensor


class StoredExtents(Readable):
    """A transport that reads extents by name from a checkpoint whose keys start with `prefix`."""

    def __init__(self, folder: TorchDistFolder, extents: Mapping[str, Extent], prefix: str = ""):
        self._folder, self._extents, self._prefix = folder, extents, prefix

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return getattr(torch, self._folder.tensors[self._prefix + self._extents[parameter].key].dtype)

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        extent = self._extents[parameter]
        part = self._folder.read(self._prefix + extent.key, extent.to_global(rectangle))
        return part.reshape(shape_of(rectangle))


class Window(io.RawIOBase):
    """A file object over part of a mapped file."""

    def __init__(self, data: mmap.mmap, offset: int, length: int):
        self._data, self._offset, self._length, self._position = data, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        start = self._offset + self._position
        buffer[:count] = self._data[start : start + count]
        self._position += count
        return count


def _mapped(data: mmap.mmap, offset: int, length: int) -> Chunk:
    """Return the chunk for the tensor that torch.save wrote at the offset."""
    file = io.BufferedReader(Window(data, offset, length))
    meta = torch.load(file, map_location="meta", weights_only=True)  # shape, dtype and offset without the elements
    storage = meta.untyped_storage()
    start = offset + storage._checkpoint_offset
    elements = torch.frombuffer(data, dtype=meta.dtype, count=storage.nbytes() // meta.itemsize, offset=start)
    return Chunk(data, start, elements.as_strided(meta.shape, meta.stride(), meta.storage_offset()))


def _stored(entry: TensorStorageMetadata) -> StoredTensor:
    rectangles = tuple(
        tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in entry.chunks
    )
    return StoredTensor(tuple(entry.size), dtype_name(entry.properties.dtype), rectangles)


def _metadata(folder: Path) -> Metadata:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: not a directory. Fix: pass a checkpoint's directory, such as checkpoints/step_000020"
        )
    if not (folder / METADATA).is_file():
        raise UserError(
            f"{folder}: contains no {METADATA}. Fix: pass a run's checkpoint, such as checkpoints/step_000020, or a "
            "checkpoint in Megatron's torch_dist format"
        )
    try:
        with (folder / METADATA).open("rb") as file:
            return load_metadata(file)
    except Exception as error:  # a malicious pickle may raise any exception
        raise UserError(
            f"{folder}: {METADATA} is corrupt or incomplete ({error}). Fix: copy the checkpoint again, or use another "
            "one"
        ) from error


def load_metadata(file: IO[bytes]) -> Metadata:
    """Unpickle the metadata of an untrusted checkpoint without calling functions that it names. Raise an exception of
    any type if the file contains anything but metadata, or refers to files outside the checkpoint's folder."""
    metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"expected Metadata, found {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        if not info.relative_path or Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{info.relative_path!r} is not a file name")
        if info.offset < 0 or info.length < 0:
            raise ValueError(f"{info.relative_path} has a negative range")
    return metadata


_CLASSES = {(torch_metadata.__name__, name) for name, kind in vars(torch_metadata).items() if isinstance(kind, type)}
_DTYPES = {("torch", name) for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_OTHERS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of an untrusted checkpoint.

    A pickle can call arbitrary functions. Only classes that describe tensors and files are instantiated; all remaining
    objects, such as save plans, are replaced with placeholders.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES | _DTYPES | _OTHERS:
            return super().find_class(module, name)
        return _enum_member if (module, name) == ("builtins", "getattr") else _Placeholder


class _Placeholder:
    """Replaces an object that is not instantiated. Accepts any arguments."""

    def __new__(cls, *_: Any, **__: Any) -> _Placeholder:
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        return


def _enum_member(kind: object, name: str) -> object:
    """Return an enum member. Replaces getattr, which Python before 3.11.4 uses to pickle enum members."""
    return kind.__members__.get(name, _Placeholder) if isinstance(kind, EnumMeta) else _Placeholder
