"""Denoise latents in batches with diffusers' own transformer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.algorithms import transition
from megarl.core.completion import VersionRun
from megarl.core.latents import Conditioning, LatentSample
from megarl.data.noise import standard_normal
from megarl.models.denoiser import DenoiserShape, StableDiffusion3Shape
from megarl.rollout.diffusers.request import ImageRequest


class Document(NamedTuple):
    """One velocity to compute. With guidance, a sample needs two: with its caption, and with the empty caption.

    Attributes:
        latents: float32 [channels, height, width].
        sigma: the noise level, from 0 (an image) to 1 (noise).
        caption: the text encoders' output, on any device.
    """

    latents: torch.Tensor
    sigma: float
    caption: Conditioning[torch.Tensor]


@torch.no_grad()
def velocities(model: Any, documents: Sequence[Document], shape: DenoiserShape, max_batch: int) -> list[torch.Tensor]:
    """Return the velocity dx/dσ of each document, float32 [channels, height, width].

    A batch contains at most `max_batch` documents, all with the same latent shape and the same padded caption length.
    diffusers would pad a mixed batch to the longest document and mask the padding, which is slower.

    Args:
        model: diffusers' transformer with this shape.
    """
    forward = _stable_diffusion_3 if isinstance(shape, StableDiffusion3Shape) else _z_image
    batches: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, document in enumerate(documents):
        batches[document.latents.shape, shape.padded(len(document.caption.tokens))].append(number)
    found: dict[int, torch.Tensor] = {}
    for numbers in batches.values():
        for start in range(0, len(numbers), max_batch):
            batch = numbers[start : start + max_batch]
            found |= zip(batch, forward(model, [documents[number] for number in batch], shape), strict=True)
    return [found[number] for number in range(len(documents))]


def _stable_diffusion_3(model: Any, documents: Sequence[Document], shape: DenoiserShape) -> list[torch.Tensor]:
    """Run SD3Transformer2DModel, which takes 1000 · σ and returns v."""
    assert isinstance(shape, StableDiffusion3Shape)
    device, dtype = documents[0].latents.device, model.dtype
    sigmas = torch.tensor([document.sigma for document in documents], dtype=torch.float32, device=device)
    captions = [document.caption.to(device, dtype) for document in documents]
    output, *_ = model(
        hidden_states=torch.stack([document.latents for document in documents]).to(dtype),
        encoder_hidden_states=torch.stack([caption.tokens for caption in captions]),
        pooled_projections=torch.stack([caption.pooled for caption in captions if caption.pooled is not None]),
        timestep=sigmas * shape.time_scale,
        return_dict=False,
    )
    return list(output.float())


def _z_image(model: Any, documents: Sequence[Document], shape: DenoiserShape) -> list[torch.Tensor]:
    """Run ZImageTransformer2DModel, which takes 1 − σ and returns −v."""
    device, dtype = documents[0].latents.device, model.dtype
    # Keep the noise level in float32, because its embedding multiplies it, and any rounding error, by 1000.
    times = 1 - torch.tensor([document.sigma for document in documents], dtype=torch.float32, device=device)
    outputs, *_ = model(
        [document.latents.to(dtype)[:, None] for document in documents],
        times,
        [document.caption.tokens.to(device, dtype) for document in documents],
        return_dict=False,
        patch_size=shape.patch,
    )
    return [-output[:, 0].float() for output in outputs]


@dataclass(slots=True)
class Trajectory:
    """The trajectory of one sample while it is being denoised.

    Attributes:
        sigmas: [N + 1], the noise levels.
        latents: float32 [channels, height, width], x at sigmas[step].
        caption, empty_caption: embeddings of the caption and of the empty caption; None for the latter without
            guidance.
        num_tokens: see LatentSample.
        step: number of finished denoising steps.
        kept: the latents before the first SDE step and after each SDE step, in host memory.
        log_probs: the log-prob of each SDE step.
        versions: the weight version of each finished step.
    """

    request: ImageRequest
    sigmas: list[float]
    latents: torch.Tensor
    caption: Conditioning[torch.Tensor]
    empty_caption: Conditioning[torch.Tensor] | None
    num_tokens: int
    step: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        request: ImageRequest,
        sigmas: list[float],
        size: tuple[int, int],
        shape: DenoiserShape,
        device: torch.device,
        caption: Conditioning[torch.Tensor],
        empty_caption: Conditioning[torch.Tensor] | None,
    ) -> Trajectory:
        """Return the trajectory before its first step. size: height and width of the latents."""
        height, width = size
        start = standard_normal(request.seed, request.sample_id, "start", (shape.channels, height, width))
        latents = start.to(device)
        image = shape.padded(height // shape.patch * (width // shape.patch))
        captions = [caption, *([] if empty_caption is None else [empty_caption])]
        num_tokens = sum(image + shape.padded(len(each.tokens)) for each in captions)
        return cls(request, sigmas, latents, caption, empty_caption, num_tokens)

    @property
    def is_done(self) -> bool:
        return self.step == self.request.denoising.num_steps

    @property
    def documents(self) -> list[Document]:
        """The documents whose velocities the next step needs: one with the caption and, under guidance, one with the
        empty caption."""
        captions = [self.caption, *([] if self.empty_caption is None else [self.empty_caption])]
        return [Document(self.latents, self.sigmas[self.step], caption) for caption in captions]

    def advance(self, velocities: Sequence[torch.Tensor], version: int) -> None:
        """Take one step, given the velocities of `documents` and the version of the weights that computed them."""
        denoising, x = self.request.denoising, self.latents[None]
        v = transition.guided(velocities[0], velocities[1], denoising.guidance) if velocities[1:] else velocities[0]
        if self.step not in denoising.sde_steps:
            x_next = transition.mean(self._transition("flow", 0.0), x, v[None])  # an Euler step of the ODE
        else:
            step = self._transition(denoising.kind, denoising.noise_level)
            noise = standard_normal(self.request.seed, self.request.sample_id, self.step, tuple(self.latents.shape))
            x_next = transition.sample(step, x, v[None], noise.to(x.device)[None])
            self.log_probs.append(transition.log_prob(step, x, v[None], x_next, denoising.reduction).item())
            self.kept += [self.latents.cpu()] * (not self.kept) + [x_next[0].cpu()]
        self.latents = x_next[0]
        self.versions.append(version)
        self.step += 1

    def _transition(self, kind: transition.TransitionKind, noise_level: float) -> transition.Transition:
        sigmas = torch.tensor(self.sigmas, dtype=torch.float64, device=self.latents.device)
        return transition.transition(
            kind, noise_level, sigmas[self.step, None], sigmas[self.step + 1, None], sigmas[1, None]
        )

    def sample(self, image: np.ndarray | None) -> LatentSample:
        """Return the finished sample, with its decoded image if the request asks for it."""
        runs: list[VersionRun] = []
        for version in self.versions:
            count = runs.pop().count if runs and runs[-1].version == version else 0
            runs.append(VersionRun(version, count + 1))
        return LatentSample(
            id=self.request.sample_id,
            prompt=self.request.prompt,
            sigmas=np.array(self.sigmas),
            steps=np.array(self.request.trained_steps, np.int32),
            latents=np.stack(self.kept) if self.kept else np.empty((0, *self.latents.shape), np.float32),
            logprobs=np.array(self.log_probs, np.float32),
            versions=tuple(runs),
            embedding=as_arrays(self.caption),
            empty_embedding=None if self.empty_caption is None else as_arrays(self.empty_caption),
            num_tokens=self.num_tokens,
            final=self.latents.cpu().numpy() if self.request.returns_final else None,
            image=image,
        )


def as_arrays(caption: Conditioning[torch.Tensor]) -> Conditioning[np.ndarray]:
    """Return a caption in host memory as float32 arrays."""
    return caption.map(lambda tensor: tensor.float().numpy())


def advance(model: Any, trajectories: Sequence[Trajectory], shape: DenoiserShape, max_batch: int, version: int) -> None:
    """Advance each trajectory by one denoising step. Trajectories may be at different steps."""
    found = iter(velocities(model, [d for t in trajectories for d in t.documents], shape, max_batch))
    for trajectory in trajectories:
        trajectory.advance([next(found) for _ in trajectory.documents], version)
