"""Rules for image models."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.models.denoiser import DenoiserShape


def images_fit_the_positions(height: int, width: int, shape: DenoiserShape, pixels_per_latent: int) -> Iterator[str]:
    pixels = pixels_per_latent * shape.patch
    for name, size, limit in zip(("height", "width"), (height, width), shape.image_limit, strict=True):
        if size % pixels or not 0 < size <= limit * pixels:
            key = f"rollout.denoising.{name}"
            yield (
                f"{key}={size}: expected a positive multiple of {pixels_per_latent} pixels per latent x {shape.patch} "
                f"latents per token = {pixels}, up to {limit} tokens x {pixels} = {limit * pixels}. Fix: set "
                f"{key}={min(limit, max(1, size // pixels)) * pixels}"
            )


def microbatch_holds_a_denoising_step(config: Config, shape: DenoiserShape, pixels_per_latent: int) -> Iterator[str]:
    """Require that a denoising step fits into a microbatch. It has one document per guidance branch, and its tokens are
    split over the context-parallel ranks."""
    denoising, budget, cp = config.rollout.denoising, config.actor.tokens_per_microbatch, config.actor.layout.cp
    pixels = pixels_per_latent * shape.patch
    image = shape.padded(-(-denoising.height // pixels) * -(-denoising.width // pixels))
    branches = [shape.max_caption_tokens, *([] if denoising.guidance == 1 else [shape.caption_tokens(1)])]
    needed = sum(image + caption for caption in branches)
    if budget * cp >= needed:
        return
    sums = " + ".join(f"({image} image + {caption} caption)" for caption in branches)
    ranks, share = (f" on actor.layout.cp={cp} ranks", f"{budget} x {cp}") if cp > 1 else ("", f"{budget}")
    yield (
        f"actor.tokens_per_microbatch={budget}: a denoising step can have {sums} = {needed} tokens{ranks} and is never "
        f"split over microbatches ({share} < {needed}). Fix: set actor.tokens_per_microbatch to at least "
        f"{-(-needed // cp)}"
    )
