"""Images in the messages of environments and agents.

Environments and agents send an image as a data: URL. The rollout process replaces each image part with
{"type": "image", "image": DIGEST}. This keeps messages small and identifies duplicates.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage, expand
from megarl.data.image_files import content_of_url
from megarl.data.image_parts import images_in, map_images
from megarl.data.image_rows import load_processor
from megarl.data.images import FORMATS, ImageError, ImageProcessor, data_url, size_of
from megarl.environments.transcript import Context

if TYPE_CHECKING:
    from megarl.config.schema import Config

Message = Mapping[str, Any]

MAX_IMAGES_PER_ROLLOUT, MAX_BYTES = 256, 2**28
"""Limits per rollout: number of distinct images, and their total size in bytes."""

MAX_THREADS = 4
"""Maximum number of threads that decode images. A rollout uses one at a time."""


class ImageStore:
    """Stores encoded images of rollouts in this process. PromptImage.file refers to a stored image."""

    def put(self, file: bytes) -> Any:
        return file

    async def get(self, file: Any) -> bytes:
        return file


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of rollouts for one model.

    Attributes:
        token: id of the model's image placeholder.
        threads: threads that decode images, shared by all rollouts.
    """

    processor: ImageProcessor
    token: int
    store: ImageStore
    threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, MAX_THREADS, "images"))

    @classmethod
    def of(cls, config: Config, folder: Path, store: ImageStore) -> ImageReader | None:
        """Return the reader for the model in this folder; None if messages cannot contain images."""
        if not (config.model.vision and config.data.chat_template):
            return None
        return cls(*load_processor(config, folder), store)


class RolloutImages:
    """The images of one rollout, by digest."""

    def __init__(self, reader: ImageReader | None, prompt: Prompt | None = None):
        """prompt: the data row's prompt, whose images refer to stored images."""
        self._reader, self._num_bytes, self._reading = reader, 0, asyncio.Lock()
        self._images: dict[str, PromptImage] = {}
        """Images by digest."""
        if prompt is not None:
            self._images |= {image.digest: image for image in prompt.images}

    @property
    def are_supported(self) -> bool:
        """Whether messages may contain images."""
        return self._reader is not None

    async def read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with digests in place of data: URLs. Decode and store new images in a thread. Raise
        ImageError for an image that cannot be used."""
        if not any(images_in(message["content"]) for message in messages):
            return messages
        threads = None if self._reader is None else self._reader.threads
        async with self._reading:  # an agent may send requests concurrently
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, map_images, messages, self._read_part)

    def _read_part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "image", "image": self._add(part["image_url"]["url"])}

    def _add(self, url: str) -> str:
        """Return the digest of an image."""
        if self._reader is None:
            raise ImageError(
                "the model does not receive images", "set model.vision=true and data.chat_template=true, or send text"
            )
        if url[:5].lower() != "data:":
            raise ImageError(
                "its URL is not a data: URL, and images are not downloaded",
                "send its content as data:image/png;base64,CONTENT",
            )
        file = content_of_url(url)
        digest = hashlib.sha256(file).hexdigest()
        if digest not in self._images:
            num_bytes = self._num_bytes + len(file)
            if len(self._images) >= MAX_IMAGES_PER_ROLLOUT or num_bytes > MAX_BYTES:
                raise ImageError(
                    f"the rollout has more than {MAX_IMAGES_PER_ROLLOUT} distinct images, or more than "
                    f"{MAX_BYTES} bytes of images",
                    "send fewer or smaller images",
                )
            processor = self._reader.processor
            grid = processor.grid(*size_of(file))
            stored = self._reader.store.put(file)
            self._images[digest] = PromptImage(0, processor.num_tokens(grid), grid, digest, stored)
            self._num_bytes = num_bytes
        return digest

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of placeholders that the images in these messages expand to. The messages contain
        digests."""
        parts = (part for message in messages for part in images_in(message["content"]))
        return sum(self._images[part["image"]].num_tokens for part in parts)

    def messages_of(self, prompt: Prompt) -> Sequence[Message]:
        """Return the data row's messages, with a digest in each image part."""
        digests = (image.digest for image in prompt.images)
        return (
            map_images(prompt.messages, lambda part: {**part, "image": next(digests)})
            if prompt.images
            else prompt.messages
        )

    async def with_urls(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with data: URLs in place of digests, in the format of the OpenAI API."""
        digests = {part["image"] for message in messages for part in images_in(message["content"])}
        if not digests:
            return list(messages)
        assert self._reader is not None, "config rules must reject images without model.vision"
        files = await asyncio.gather(*(self._reader.store.get(self._images[digest].file) for digest in digests))
        urls = dict(zip(digests, await asyncio.to_thread(lambda: list(map(_typed_url, files))), strict=True))
        return map_images(messages, lambda part: {"type": "image_url", "image_url": {"url": urls[part["image"]]}})

    def place(self, token_ids: Sequence[int], messages: Sequence[Message]) -> Context:
        """Expand each placeholder to one per feature. Return the token ids with the images at their positions. Raise a
        UserError unless the ids of these messages have one placeholder per image. Callers check `num_tokens` first, to
        bound the result."""
        if self._reader is None:
            return Context(token_ids)
        digests = [part["image"] for message in messages for part in images_in(message["content"])]
        token = self._reader.token
        if (count := list(token_ids).count(token)) != len(digests):
            fix = "send images in user messages, or use a chat template that supports images in all roles"
            if count > len(digests):
                fix = "send images as parts of type image, and use a chat template that adds no other placeholders"
            raise UserError(
                f"environment: the chat template renders {count} placeholders for {len(digests)} images. Fix: {fix}"
            )
        return Context(*expand(token_ids, token, [self._images[digest] for digest in digests]))

    def require_no_placeholders(self, token_ids: Sequence[int]) -> None:
        """Raise ImageError if token ids from an environment contain image placeholders. Token ids come without
        images."""
        if self._reader is not None and self._reader.token in token_ids:
            raise ImageError("token_ids contain image placeholders", "return messages with image parts instead")


class Tokens(Protocol):
    """Conversation renderer: `ChatTokens` or `PlainTokens`."""

    def begin(self, messages: Sequence[Message]) -> list[int]: ...

    def shown(self, messages: Sequence[Message]) -> list[Message]: ...

    def extend(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None: ...


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Renders conversations whose messages refer to the images of a rollout."""

    tokens: Tokens
    images: RolloutImages

    def begin(self, messages: Sequence[Message]) -> Context:
        """Return the conversation as `Tokens.begin` renders it. Raise a UserError if the chat template drops images."""
        return self.images.place(self.tokens.begin(messages), messages)

    def extend(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> Context | None:
        """Return the messages as `Tokens.extend` renders them, or None. Raise a UserError if the chat template drops
        images."""
        # Search only the new messages for placeholders: a turn may contain them as ordinary tokens.
        token_ids = self.tokens.extend(turn_ids, messages)
        return None if token_ids is None else self.images.place(token_ids, messages)

    @property
    def shown(self) -> Callable[[Sequence[Message]], list[Message]]:
        return self.tokens.shown


def _typed_url(file: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(file), formats=FORMATS) as image:
        return data_url(file, image.get_format_mimetype() or "image/png")
