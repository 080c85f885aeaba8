"""Pass the images of prompts to vLLM.

vLLM's own processors need torchvision and locate placeholders by token id, but a policy may sample the placeholder
token. megarl passes patches from the trainer's image processor and the placeholders' spans instead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import vllm.v1.core.sched.output as scheduler_output
from vllm.config import SchedulerConfig
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from megarl.core.prompt_images import PromptImage
from megarl.data.images import ImageProcessor

IMAGE = "image"
"""vLLM's name for the modality."""

PIXELS = "mm_processor_kwargs"
"""vLLM's argument for image size limits; set only for engines with a vision tower."""

MAX_THREADS = 4
"""Maximum number of threads that compute patches in an engine."""


def vision_arguments(min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine with a vision tower. `min_pixels` and `max_pixels` are the
    limits of ImageProcessor."""
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    return {
        PIXELS: {name: value for name, value in limits.items() if value is not None},
        "mm_device_do_normalize": False,  # patches are normalized
        # ImageInputs shares patches in this process. With tp > 1, every request sends its patches to every worker.
        "mm_processor_cache_gb": 0,
        "mm_encoder_tp_mode": "data",  # each rank holds the whole tower, which refits write
    }


class ImageInputs:
    """Converts the images of prompts to vLLM's inputs. Requests with the same image share its patches."""

    def __init__(self, processor: ImageProcessor):
        self._processor = processor
        self._items: WeakValueDictionary[str, MultiModalKwargsItem] = WeakValueDictionary()
        """Patches of the images of pending requests, by digest."""
        self._loading: dict[str, asyncio.Future[MultiModalKwargsItem]] = {}
        """Patches that threads are computing, by digest."""
        self._threads = ThreadPoolExecutor(MAX_THREADS, "images")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ImageInputs | None:
        """Return the inputs of an engine with these arguments of `vllm.LLM`; None if it has no vision tower."""
        if PIXELS not in arguments:
            return None
        return cls(ImageProcessor.of(Path(arguments["model"]), **arguments[PIXELS]))

    async def load(self, images: Sequence[PromptImage]) -> list[MultiModalKwargsItem]:
        """Compute the images' patches in threads. Requests for the same image share its patches, which are freed after
        the last of these requests. Raise a UserError if the patches do not match the prompt's placeholders."""
        return list(await asyncio.gather(*map(self._item, images)))

    def prompt(
        self,
        token_ids: list[int],
        images: Sequence[PromptImage],
        items: Sequence[MultiModalKwargsItem],
        cache_salt: str,
    ) -> MultiModalInput:
        """Return vLLM's input for a prompt with expanded placeholders. vLLM caches features by digest.
        `items`: the result of `load` for these images."""
        return mm_input(
            token_ids,
            MultiModalKwargsItems({IMAGE: [*items]}),
            {IMAGE: [image.digest for image in images]},
            {IMAGE: [PlaceholderRange(image.start, image.num_tokens) for image in images]},
            cache_salt=cache_salt,
        )

    async def _item(self, image: PromptImage) -> MultiModalKwargsItem:
        digest = image.digest
        item = self._items.get(digest)
        if item is None:
            if digest not in self._loading:
                future = asyncio.get_running_loop().run_in_executor(self._threads, self._convert, image)
                self._loading[digest] = future
                future.add_done_callback(lambda _: self._loading.pop(digest))
            # Canceling one request must not cancel the computation for requests that share the image.
            item = self._items[digest] = await asyncio.shield(self._loading[digest])
        return item

    def _convert(self, image: PromptImage) -> MultiModalKwargsItem:
        return kwargs_item(torch.from_numpy(self._processor.patches_in(image)), image.grid)


def kwargs_item(patches: torch.Tensor, grid: Sequence[int]) -> MultiModalKwargsItem:
    """Convert an image's patches, float32 [P, D], and grid to a vLLM item."""
    fields = dict(
        pixel_values=MultiModalFieldConfig.flat_from_sizes(IMAGE, torch.tensor([len(patches)])),
        image_grid_thw=MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
    )
    data: Any = dict(pixel_values=patches, image_grid_thw=torch.tensor([grid]))
    [item] = MultiModalKwargsItems.from_hf_inputs(data, fields)[IMAGE]
    return item


class ImageInfo(BaseProcessingInfo):
    """Image limits from which vLLM sizes its memory profile and encoder cache."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {IMAGE: self.max_tokens(seq_len)}

    @property
    def processor(self) -> ImageProcessor:
        limits: dict[str, Any] = dict(self.ctx.get_mm_config().mm_processor_kwargs or {})
        return ImageProcessor.of(Path(self.ctx.model_config.model), **limits)

    def max_tokens(self, context_length: int) -> int:
        """Return the maximum number of features that an image may have in a context of this length."""
        settings = self.processor.processor
        side = settings.patch_size * settings.merge_size
        return max(1, min(settings.size["longest_edge"] // side**2, context_length))

    def dummy_grid(self, context_length: int) -> tuple[int, int, int]:
        """Return the grid of a nearly square image with at most `max_tokens` features."""
        settings, num_tokens = self.processor.processor, self.max_tokens(context_length)
        rows = math.isqrt(num_tokens)
        return 1, rows * settings.merge_size, num_tokens // rows * settings.merge_size


class NoDummyInputs(BaseDummyInputsBuilder[ImageInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError

    def get_dummy_mm_data(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class ReadyImages(BaseMultiModalProcessor[ImageInfo]):
    """Processor for requests that already contain patches. It provides only the dummy images for memory profiling."""

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, cache: object = None, scheduler_config: SchedulerConfig | None = None
    ) -> MultiModalInput:
        length = self.info.ctx.model_config.max_model_len
        grid = self.info.dummy_grid(length)
        settings, num_tokens = self.info.processor.processor, self.info.processor.num_tokens(grid)
        size = 3 * settings.temporal_patch_size * settings.patch_size**2
        item = kwargs_item(torch.zeros(math.prod(grid), size), grid)
        return mm_input(
            [0] * length,
            MultiModalKwargsItems({IMAGE: [item]}),
            {IMAGE: ["largest"]},
            {IMAGE: [PlaceholderRange(0, num_tokens)]},
        )

    def _get_mm_fields_config(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _get_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def keep_patches() -> None:
    """Keep the patches of requests that start with a cached prefix. vLLM does not send the patches of images in the
    prefix to its workers, but a request needs them if it is preempted or if a refit clears the cache."""
    setattr(scheduler_output, "strip_covered_mm_data", lambda features, *_args, **_kwargs: features)  # noqa: B010


def accept_patches(model: Any) -> None:
    """Register ReadyImages for a vLLM model class in place of its own processor."""
    del model._processor_factory  # avoids vLLM's warning about a second processor
    register = MULTIMODAL_REGISTRY.register_processor(ReadyImages, info=ImageInfo, dummy_inputs=NoDummyInputs)
    register(model)
