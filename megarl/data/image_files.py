"""The encoded images of a data set. Only their digests and sizes stay in memory."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, unquote_to_bytes

from megarl.core.errors import UserError
from megarl.core.files import UnusableFile, open_regular
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.images import ImageError, size_of

MAX_FILE_BYTES = 2**28
"""Maximum size of an encoded image in bytes."""

Pictured = TypeVar("Pictured", Prompt, Sample)
"""A prompt or a sample; both have images."""

_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A validated image: the SHA-256 of its encoded bytes, its size in pixels, and the number of encoded bytes."""

    digest: str
    width: int
    height: int
    num_bytes: int


class ImageFiles:
    """The encoded images of a data set, by digest.

    Image files are read again when needed. Images from data files are copied to an unnamed temporary file in $TMPDIR,
    which is deleted when the process exits. Methods may be called from several threads.

    Args:
        folders: absolute paths of the folders that may contain image files, in addition to those of the data files.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = tuple(folders)
        self._images: dict[str, StoredImage] = {}
        self._places: dict[str, Path | tuple[int, int]] = {}
        """Digest -> image file, or (offset, size) in the temporary file."""
        self._digests: dict[Path, str] = {}
        self._copies: BinaryIO | None = None
        self._num_bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of distinct images."""
        return len(self._images)

    def add(self, value: Any, folder: Path) -> StoredImage:
        """Decode and register an image of a data row. Raise ImageError if it cannot be read or decoded, or if it is a
        file outside the allowed folders. Symbolic links in these folders may point outside.

        Args:
            value: a file path or file: URL, a data: URL, bytes or {bytes, path}.
            folder: absolute path of the data file's folder. Relative paths are resolved against it.
        """
        source = _source(value, folder)
        if isinstance(source, Path) and not any(map(source.is_relative_to, (folder, *self._folders))):
            raise ImageError("it is outside the folder of the data file", "add its folder to data.image_folders")
        if isinstance(source, Path) and (known := self._digests.get(source)) is not None:
            return self._images[known]
        file = _read(source) if isinstance(source, Path) else source
        if len(file) > MAX_FILE_BYTES:
            raise ImageError(f"it has more than {MAX_FILE_BYTES} bytes")
        digest = hashlib.sha256(file).hexdigest()
        image = self._images.get(digest)
        if image is None:
            image = StoredImage(digest, *size_of(file), len(file))
        with self._lock:
            if digest not in self._places:
                self._places[digest] = source if isinstance(source, Path) else self._copy(file)
            self._images[digest] = image
            if isinstance(source, Path):
                self._digests[source] = digest
        return image

    def size(self, digest: str) -> int:
        """Return the size of the encoded image in bytes."""
        return self._images[digest].num_bytes

    def read(self, digest: str) -> bytes:
        """Return the encoded image. Raise a UserError if its file has changed since it was added."""
        place = self._places[digest]
        if not isinstance(place, Path):
            assert self._copies is not None, "images were copied without a temporary file"
            file = os.pread(self._copies.fileno(), place[1], place[0])
            assert len(file) == place[1], "the temporary file with images is incomplete"
            return file
        try:
            file = _read(place)
        except ImageError as error:
            raise UserError(
                f"{place}: the image can no longer be used: {error}. Fix: restore the file, then resume the run"
            ) from None
        if hashlib.sha256(file).hexdigest() != digest:
            raise UserError(f"{place}: the image has changed since the run started. Fix: restore the file")
        return file

    def attach(self, item: Pictured) -> Pictured:
        """Return the prompt or sample with its encoded images. Raise the errors of `read`."""
        return item.with_files([self.read(image.digest) for image in item.images])

    def _copy(self, file: bytes) -> tuple[int, int]:
        """Append an image to the temporary file, and return its offset and size. Requires the lock."""
        offset = self._num_bytes
        try:
            if self._copies is None:
                self._copies = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this object exists)
            self._copies.seek(offset)
            self._copies.write(file)
            self._copies.flush()
        except OSError as error:
            raise UserError(
                f"{tempfile.gettempdir()}: cannot copy embedded images to a temporary file ({error.strerror}). "
                "Fix: free disk space, or set TMPDIR to a folder on a larger disk"
            ) from None
        self._num_bytes += len(file)
        return offset, len(file)


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a data set by row.

    Attributes:
        files: the encoded images; None without images.
        rows: the images of each row.
    """

    files: ImageFiles | None
    rows: Sequence[Sequence[PromptImage]]

    def num_bytes(self, num_draws: int | None = None, max_repeats: int = 1) -> int:
        """Return an upper bound on the total size, in bytes, of the encoded images of the drawn rows.

        Args:
            num_draws: number of drawn rows; None: all rows once.
            max_repeats: maximum number of times that a row is drawn.
        """
        files = self.files
        if files is None:
            return 0
        return self._at_most(lambda image: files.size(image.digest), num_draws, max_repeats)

    def num_tokens(self, num_draws: int, max_repeats: int = 1) -> int:
        """Return an upper bound on the number of image tokens in the drawn rows; see `num_bytes`."""
        return self._at_most(lambda image: image.num_tokens, num_draws, max_repeats)

    def _at_most(self, size: Callable[[PromptImage], int], num_draws: int | None, max_repeats: int) -> int:
        sizes = sorted((sum(map(size, images)) for images in self.rows), reverse=True)
        repeated, rest = divmod(len(sizes) if num_draws is None else num_draws, max_repeats)
        return max_repeats * sum(sizes[:repeated]) + rest * sum(sizes[repeated : repeated + 1])


def _source(value: Any, folder: Path) -> Path | bytes:
    """Return an image's normalized path, or its content if the row contains it."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), str):
            raise ImageError("its field bytes is text", "write data:image/png;base64,CONTENT")
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    scheme, colon, rest = value.partition(":")
    if colon and scheme.lower() == "data":
        return content_of_url(value)
    if _REMOTE.match(value):
        raise ImageError("images are not downloaded", "download it and use the file's path")
    if colon and scheme.lower() == "file":
        if rest.startswith("//"):
            host, slash, path = rest[2:].partition("/")
            if host not in ("", "localhost"):
                raise ImageError(f"it is on another host ({host})", "copy it and use the file's path")
            rest = slash + path
        value = unquote(rest)
    return Path(os.path.normpath(folder / value))


def content_of_url(url: str) -> bytes:
    """Return the content of a data: URL. Raise ImageError if it is malformed."""
    header, comma, content = url.partition(",")
    if not comma:
        raise ImageError("its data: URL has no comma before the content", "write data:image/png;base64,CONTENT")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(content)
    try:
        return base64.b64decode(unquote(content), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"its data: URL is not valid base64 ({error})", "encode the image again") from None


def _read(path: Path) -> bytes:
    """Read at most MAX_FILE_BYTES + 1 bytes of a regular file, so that callers can detect files that are too large."""
    fix = "use the path of a readable image file"
    try:
        with open_regular(path, follow=True) as file:
            return file.read(MAX_FILE_BYTES + 1)
    except UnusableFile as error:
        raise ImageError(f"it is {error.reason}", fix) from None
    except OSError as error:
        raise ImageError(f"it cannot be read ({error.strerror})", fix) from None
    except ValueError as error:
        raise ImageError(f"its path is invalid ({error})", fix) from None


def describe(value: Any) -> str:
    """Describe an image of a data row for error messages: its path, its size or the start of its URL."""
    if isinstance(value, Mapping):
        return describe(value.get("path") or value.get("bytes") or "")
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value if len(value) <= 80 and not value.lower().startswith("data:") else f"{value[:30]}…"
