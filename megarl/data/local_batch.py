"""The samples and microbatches that one rank processes in an update or a pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megarl.core.prompt_images import PromptImage
from megarl.core.sample import SampleRef
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import Reads, add_scalars, collate
from megarl.data.images import ImageProcessor
from megarl.data.packing import Microbatch, Packing


class LocalBatch:
    """A rank's samples and its microbatches of sample indices. Each microbatch is collated once and reused by all
    passes and updates that read it."""

    def __init__(self, samples: Sequence[SampleRef], microbatches: Sequence[Microbatch]):
        self.samples = tuple(samples)
        self.microbatches = tuple(microbatches)
        self._collated: dict[tuple[Packing, Reads, bool, bool, torch.device, bool], list[TokenBatch]] = {}
        self._pixels: dict[str, torch.Tensor] = {}
        """Digest of an image -> its patches, which microbatches share."""

    @property
    def members(self) -> list[list[SampleRef]]:
        """The samples of each microbatch."""
        return [[self.samples[index] for index in microbatch] for microbatch in self.microbatches]

    def token_batches(
        self,
        packing: Packing,
        reads: Reads,
        truncates: bool,
        replays: bool,
        device: torch.device,
        processor: ImageProcessor | None = None,
    ) -> list[TokenBatch]:
        """Return the microbatches as collated by `collate`, on the given device. `processor` is None on a rank without
        a vision tower."""
        # Without routes, passes that replay them and passes that do not can share the same microbatches.
        replays = replays and any(item.sample.routes is not None for item in self.samples)
        key = packing, reads, truncates, replays, device, processor is not None
        if key not in self._collated:
            pixels = None if processor is None else partial(self._pixels_of, processor)
            collated = [collate(members, packing, reads, truncates, replays, pixels) for members in self.members]
            self._collated[key] = [batch.to(device) for batch in collated]
        return self._collated[key]

    def _pixels_of(self, processor: ImageProcessor, image: PromptImage) -> torch.Tensor:
        if image.digest not in self._pixels:
            self._pixels[image.digest] = torch.from_numpy(processor.patches_in(image))
        return self._pixels[image.digest]

    def renewed(self, samples: Sequence[SampleRef]) -> LocalBatch:
        """Return a batch of the same samples with up-to-date rewards, baselines and loss weights."""
        renewed = LocalBatch(samples, self.microbatches)
        renewed._pixels = self._pixels
        renewed._collated = {
            key: [add_scalars(batch, members) for batch, members in zip(batches, renewed.members, strict=True)]
            for key, batches in self._collated.items()
        }
        return renewed
