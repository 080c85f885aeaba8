"""Types for image models: sampled latents, and inputs for comparing the velocities of engine and trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.core.arrays import HoldsArrays
from megarl.core.completion import VersionRun, newest, oldest
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef

A = TypeVar("A", bound=Any)
B = TypeVar("B")


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning(HoldsArrays, Generic[A]):
    """The text encoders' output for a caption, as arrays or as tensors.

    Attributes:
        tokens: float32 [L ≥ 1, caption channels].
        pooled: float32 [pooled channels], a summary of the caption; None for models that do not use one.
    """

    tokens: A
    pooled: A | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2, f"tokens has shape {tuple(self.tokens.shape)}"
        assert self.pooled is None or self.pooled.ndim == 1, f"pooled has shape {tuple(self.pooled.shape)}"

    def map(self, function: Callable[[A], B]) -> Conditioning[B]:
        """Apply the function to both arrays."""
        return Conditioning(function(self.tokens), None if self.pooled is None else function(self.pooled))

    def to(self: Conditioning[Any], *target: Any) -> Conditioning[Any]:
        """Move tensors to a device, or convert them to a dtype."""
        return self.map(lambda tensor: tensor.to(*target))


def _frozen(caption: Conditioning[Any]) -> Conditioning[NDArray[np.float32]]:
    """Return the caption with read-only float32 arrays."""

    def freeze(values: Any) -> NDArray[np.float32]:
        array = np.asarray(values, np.float32).view()
        array.setflags(write=False)
        return array

    return caption.map(freeze)


@dataclass(frozen=True, slots=True, eq=False)
class LatentSample(HoldsArrays):
    """One image sampled in N denoising steps. K ≤ N of them are trained: either they are consecutive and stored with
    the latents before and after each, or they are arbitrary and the trainer noises the final latents to their levels.

    Processes exchange it in two parts, `for_training` and `for_rewards`. Each lacks the arrays of the other.

    Attributes:
        prompt: the prompt. Its text is the caption.
        sigmas: float64 [N + 1], the noise levels, from 1 to 0.
        steps: int32 [K], the trained denoising steps. Step i leads from sigmas[i] to sigmas[i + 1].
        latents: float32 [K + 1, channels, height, width], x before the first trained step and after each trained step.
            The first axis has size 0 if no step is trained or the trainer adds the noise.
        logprobs: float32 [K], log-probs of the stored latents under the rollout policy, averaged over elements; empty
            if the trainer adds the noise.
        versions: runs of denoising steps with the same weight version; their counts sum to N.
        embedding: the caption's embedding, as used for sampling.
        empty_embedding: the empty caption's embedding; None without guidance.
        num_tokens: number of tokens that the model processes for one denoising step, with padding and, if guidance is
            used, for both branches.
        final: float32 [channels, height, width], the latents at σ = 0; None unless requested.
        image: uint8 [image height, image width, 3], the decoded RGB image; None unless requested.
    """

    id: str
    prompt: Prompt
    sigmas: NDArray[np.float64]
    steps: NDArray[np.int32]
    latents: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    embedding: Conditioning[NDArray[np.float32]]
    empty_embedding: Conditioning[NDArray[np.float32]] | None
    num_tokens: int
    final: NDArray[np.float32] | None = None
    image: NDArray[np.uint8] | None = None

    episode: ClassVar[None] = None
    """As in Sample. Always None, because environments do not sample images."""

    def __post_init__(self) -> None:
        self._freeze("sigmas", np.float64)
        self._freeze("steps", np.int32)
        self._freeze("latents", np.float32, axes=4)
        self._freeze("logprobs", np.float32)
        object.__setattr__(self, "embedding", _frozen(self.embedding))
        if self.empty_embedding is not None:
            object.__setattr__(self, "empty_embedding", _frozen(self.empty_embedding))
        if self.final is not None:
            self._freeze("final", np.float32, axes=3)
        if self.image is not None:
            self._freeze("image", np.uint8, axes=3)
        num_trained, num_steps = len(self.steps), len(self.sigmas) - 1
        num_stored = 0 if self.is_noised else num_trained
        is_complete = (len(self.logprobs), len(self.latents)) == (num_stored, num_stored + bool(num_stored))
        assert is_complete or not len(self.embedding.tokens), (  # samples for reward functions have no embedding
            f"sample {self.id}: {len(self.logprobs)} log-probs and {len(self.latents)} latents for {num_trained} steps"
        )
        assert sum(run.count for run in self.versions) == num_steps, (
            f"sample {self.id}: versions {self.versions} for {num_steps} denoising steps"
        )

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def for_training(self) -> LatentSample:
        """The part without the image."""
        return replace(self, image=None)

    @property
    def for_rewards(self) -> LatentSample:
        """The part without latents and embeddings."""
        without = self.latents[:0], self.embedding.map(lambda array: array[:0])
        return replace(self, latents=without[0], embedding=without[1], empty_embedding=None, final=None)

    @property
    def is_noised(self) -> bool:
        """Whether the trainer adds new noise to the final latents."""
        return self.final is not None and not len(self.latents)

    @property
    def rollout_id(self) -> str:
        return self.id

    @property
    def num_sampled(self) -> int:
        """Number of denoising steps."""
        return len(self.sigmas) - 1

    @property
    def ref(self) -> SampleRef:
        """The sample's ids and counts."""
        return SampleRef(
            id=self.id,
            prompt_id=self.prompt.id,
            num_prompt_tokens=0,
            num_response_tokens=len(self.steps),
            num_trained_tokens=len(self.steps),
            finish_reason="stop",
            version_oldest=oldest(self.versions),
            version_newest=newest(self.versions),
            tokens_per_step=self.num_tokens,
        )

    @property
    def response(self) -> NDArray[np.uint8]:
        """The image, as reward functions receive it."""
        assert self.image is not None, f"sample {self.id} was requested without its image"
        return self.image


AnySample = Sample | LatentSample
"""A sample of a language model or of an image model."""


@dataclass(frozen=True, slots=True, eq=False)
class VelocityInput(HoldsArrays):
    """One input for a velocity computation.

    Attributes:
        latents: float32 [channels, height, width].
        sigma: the noise level, from 0 (an image) to 1 (noise).
        caption: the text encoders' output.
    """

    latents: NDArray[np.float32]
    sigma: float
    caption: Conditioning[NDArray[np.float32]]

    def __post_init__(self) -> None:
        self._freeze("latents", np.float32, axes=3)
        object.__setattr__(self, "caption", _frozen(self.caption))


def canaries(
    channels: int, caption_channels: int, patch: int, pooled_channels: int | None = None
) -> list[VelocityInput]:
    """Return fixed inputs that are the same in every process. Their sizes cover images and captions with and without
    padding."""
    random = np.random.Generator(np.random.Philox(0))
    # Numbers of rows and columns of image tokens, and number of caption tokens. Z-Image pads to multiples of 32.
    sizes = ((4, 8, 32, 1.0), (4, 8, 5, 0.75), (3, 5, 32, 0.5), (3, 5, 5, 0.25), (1, 1, 1, 0.0))
    return [
        VelocityInput(
            random.standard_normal((channels, rows * patch, columns * patch), np.float32),
            sigma,
            Conditioning(
                random.standard_normal((length, caption_channels), np.float32),
                None if pooled_channels is None else random.standard_normal(pooled_channels, np.float32),
            ),
        )
        for rows, columns, length, sigma in sizes
    ]
