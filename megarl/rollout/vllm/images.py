"""Pass the images of prompts to vLLM.

vLLM would compute an image's patches and find its placeholders with transformers' processors, which need torchvision.
Here, patches come from the trainer's image processor, and places are spans of the prompt: a policy may sample the
placeholder token, so token ids do not reveal places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.config import SchedulerConfig
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from megarl.core.errors import UserError
from megarl.core.prompt_images import PromptImage
from megarl.data.images import ImageProcessor

IMAGE = "image"
"""vLLM's name of the modality."""

PIXELS = "mm_processor_kwargs"
"""vLLM's argument for the limits of image sizes, which engines without a vision tower lack."""


def vision_arguments(min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine with a vision tower. `min_pixels` and `max_pixels` are the
    limits of ImageProcessor."""
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    return {
        PIXELS: {name: value for name, value in limits.items() if value is not None},
        "mm_device_do_normalize": False,  # patches are normalized
        "mm_processor_cache_gb": 0,  # ImageInputs shares patches
        "mm_encoder_tp_mode": "data",  # each rank holds the whole tower, which refits write
    }


class ImageInputs:
    """Converts the images of prompts to vLLM's inputs. Requests with the same image share its patches."""

    def __init__(self, processor: ImageProcessor):
        self._processor = processor
        self._items: WeakValueDictionary[str, MultiModalKwargsItem] = WeakValueDictionary()
        """Patches of the images of pending requests, by digest."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ImageInputs | None:
        """Return the inputs of an engine with these arguments of `vllm.LLM`; None if it has no vision tower."""
        if PIXELS not in arguments:
            return None
        return cls(ImageProcessor.of(Path(arguments["model"]), **arguments[PIXELS]))

    def prompt(self, token_ids: list[int], images: Sequence[PromptImage], cache_salt: str) -> MultiModalInput:
        """Return the input for a prompt whose tokens include all placeholders. vLLM caches features by digest."""
        return mm_input(
            token_ids,
            MultiModalKwargsItems({IMAGE: [self._item(image) for image in images]}),
            {IMAGE: [image.digest for image in images]},
            {IMAGE: [PlaceholderRange(image.start, image.num_tokens) for image in images]},
            cache_salt=cache_salt,
        )

    def _item(self, image: PromptImage) -> MultiModalKwargsItem:
        item = self._items.get(image.digest)
        if item is None:
            patches = self._processor.patches([image.file])
            if len(patches) != math.prod(image.grid):
                raise UserError(
                    f"model.vision=true: image {image.digest} has {len(patches)} patches in the engine, but the prompt "
                    f"has placeholders for {math.prod(image.grid)}. Fix: use the same model folder and version of "
                    "transformers on all nodes"
                )
            item = self._items[image.digest] = kwargs_item(torch.from_numpy(patches), image.grid)
        return item


def kwargs_item(patches: torch.Tensor, grid: Sequence[int]) -> MultiModalKwargsItem:
    """Return vLLM's form of an image with these patches, float32 [P, D], and this grid."""
    fields = dict(
        pixel_values=MultiModalFieldConfig.flat_from_sizes(IMAGE, torch.tensor([len(patches)])),
        image_grid_thw=MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
    )
    data: Any = dict(pixel_values=patches, image_grid_thw=torch.tensor([grid]))
    [item] = MultiModalKwargsItems.from_hf_inputs(data, fields)[IMAGE]
    return item


class ImageInfo(BaseProcessingInfo):
    """What vLLM needs to know to reserve memory for images."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {IMAGE: self.processor.num_tokens(self.largest_grid(seq_len))}

    @property
    def processor(self) -> ImageProcessor:
        limits: dict[str, Any] = dict(self.ctx.get_mm_config().mm_processor_kwargs or {})
        return ImageProcessor.of(Path(self.ctx.model_config.model), **limits)

    def largest_grid(self, max_tokens: int) -> tuple[int, int, int]:
        """Return the grid of the largest image that fits into a context of this length."""
        settings = self.processor.processor
        side = settings.patch_size * settings.merge_size
        num_tokens = max(1, min(settings.size["longest_edge"] // side**2, max_tokens))
        rows = math.isqrt(num_tokens)
        return 1, rows * settings.merge_size, num_tokens // rows * settings.merge_size


class NoDummyInputs(BaseDummyInputsBuilder[ImageInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError

    def get_dummy_mm_data(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class ReadyImages(BaseMultiModalProcessor[ImageInfo]):
    """vLLM's processor for engines whose requests contain patches. It only provides the images with which vLLM measures
    memory."""

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, cache: object = None, scheduler_config: SchedulerConfig | None = None
    ) -> MultiModalInput:
        length = self.info.ctx.model_config.max_model_len
        grid = self.info.largest_grid(length)
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


def accept_patches(model: Any) -> None:
    """Replace the processor of a vLLM model class, which needs transformers' processors."""
    del model._processor_factory  # vLLM logs a warning about two processors
    register = MULTIMODAL_REGISTRY.register_processor(ReadyImages, info=ImageInfo, dummy_inputs=NoDummyInputs)
    register(model)
