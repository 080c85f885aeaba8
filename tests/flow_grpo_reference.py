"""Reference Flow-GRPO and DiffusionNFT in plain diffusers and torch, written from the papers: one denoising step at a
time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from megarl.core.latents import LatentSample
from megarl.data.noise import standard_normal
from megarl.megatron.model.denoiser.inputs import Document
from tests.lora_reference import plain_name
from tests.tiny_denoiser import TinyDenoiser

Groups = Sequence[Sequence[tuple[LatentSample, float]]]
"""The images of each prompt with their rewards."""


class _Reference:
    """A model trained by AdamW, with classifier-free guidance, and the initial model."""

    def __init__(
        self,
        tiny: TinyDenoiser,
        folder: Path,
        *,
        lr: float,
        eps: float,
        guidance: float,
        adapters: Path | None = None,
        dtype: torch.dtype | None = None,
    ):
        """
        Args:
            adapters: PEFT folder of the adapters to train instead of the weights.
            dtype: dtype of the model; None: the default dtype. The loss has the default dtype.
        """
        self.tiny = tiny
        # diffusers' own `to` warns.
        self.model, self.start = (
            torch.nn.Module.to(tiny.load(folder), dtype or torch.get_default_dtype()) for _ in range(2)
        )
        if adapters is not None:
            self.model = PeftModel.from_pretrained(self.model, adapters, is_trainable=True)
        self.trained = {plain_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=lr, eps=eps, weight_decay=0.0)
        self.guidance = guidance

    def velocity_at(self, model: Any, sample: LatentSample, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Return the velocity under guidance."""
        captions = [caption.map(torch.tensor).to(model.dtype) for caption in (sample.embedding, sample.empty_embedding)]
        documents = [Document(x.to(model.dtype), float(sigma), caption) for caption in captions]
        conditional, unconditional = (v.to(x.dtype) for v in self.tiny.velocities(model, documents))
        return unconditional + self.guidance * (conditional - unconditional)

    def optimize(self, terms: Sequence[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor], float]:
        """Run one optimizer step on the mean of the terms. Return the loss, the gradients before clipping by name, and
        the gradient norm."""
        self.optimizer.zero_grad()
        loss = torch.stack(list(terms)).mean()
        loss.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        return float(loss.detach()), gradients, float(norm)


class FlowGrpoReference(_Reference):
    """GRPO's clipped loss over denoising steps (arXiv 2505.05470), with the exact KL to the initial model."""

    def __init__(self, tiny: TinyDenoiser, folder: Path, *, noise_level: float, **options: Any):
        super().__init__(tiny, folder, **options)
        self.noise_level = noise_level

    def velocity(self, model: torch.nn.Module, sample: LatentSample, index: int) -> torch.Tensor:
        """Return the velocity of a trained step."""
        x = torch.tensor(sample.latents[index], dtype=torch.get_default_dtype())
        return self.velocity_at(model, sample, x, sample.sigmas[sample.steps[index]])

    def gaussian(self, model: torch.nn.Module, sample: LatentSample, index: int) -> torch.distributions.Normal:
        """Return the distribution of a trained step's next latents, an Euler step of Flow-GRPO's SDE."""
        sigma, sigma_next = sample.sigmas[sample.steps[index] :][:2]
        x, v = torch.tensor(sample.latents[index], dtype=torch.get_default_dtype()), self.velocity(model, sample, index)
        g = self.noise_level * math.sqrt(sigma / (1 - (sample.sigmas[1] if sigma == 1 else sigma)))
        drift = v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)
        return torch.distributions.Normal(x - (sigma - sigma_next) * drift, g * math.sqrt(sigma - sigma_next))

    def log_prob(self, sample: LatentSample, index: int) -> torch.Tensor:
        next_latents = torch.tensor(sample.latents[index + 1], dtype=torch.get_default_dtype())
        return self.gaussian(self.model, sample, index).log_prob(next_latents).mean()

    def old(self, groups: Groups) -> dict[tuple[str, int], torch.Tensor]:
        """Return the log-probs under the current model, by sample and index."""
        with torch.no_grad():
            return {(s.id, k): self.log_prob(s, k) for group in groups for s, _ in group for k in range(len(s.steps))}

    def update(
        self, groups: Groups, old: dict[tuple[str, int], torch.Tensor], clip: float, kl_coefficient: float
    ) -> tuple[float, dict[str, torch.Tensor], float]:
        terms = []
        for group in groups:
            for (sample, _), advantage in zip(group, _advantages(group), strict=True):
                for k in range(len(sample.steps)):
                    ratio = (self.log_prob(sample, k) - old[sample.id, k]).exp()
                    clipped = ratio.clamp(1 - clip, 1 + clip)
                    with torch.no_grad():
                        reference = self.gaussian(self.start, sample, k)
                    policy = self.gaussian(self.model, sample, k)
                    kl = torch.distributions.kl_divergence(policy, reference).mean()
                    terms.append(-torch.minimum(ratio * advantage, clipped * advantage) + kl_coefficient * kl)
        return self.optimize(terms)


class DiffusionNftReference(_Reference):
    """DiffusionNFT's loss (arXiv 2509.16117) on sampled images with new noise, with the mean squared difference of the
    velocities to the initial model. The noise has the seed 0."""

    def noised(self, sample: LatentSample, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sampled image and its noised version at the noise level of a denoising step."""
        dtype = torch.get_default_dtype()
        x0, noise = torch.tensor(sample.final), standard_normal(0, sample.id, step, sample.final.shape)
        sigma = sample.sigmas[step]
        return x0.to(dtype), ((1 - sigma) * x0 + sigma * noise).to(dtype)

    def old(self, groups: Groups) -> dict[tuple[str, int], torch.Tensor]:
        """Return the velocities of the current model, by sample and step."""
        with torch.no_grad():
            return {
                (sample.id, step): self.velocity_at(
                    self.model, sample, self.noised(sample, step)[1], sample.sigmas[step]
                )
                for group in groups
                for sample, _ in group
                for step in sample.steps.tolist()
            }

    def update(
        self,
        groups: Groups,
        old: dict[tuple[str, int], torch.Tensor],
        mixture: float,
        advantage_limit: float,
        kl_coefficient: float,
    ) -> tuple[float, dict[str, torch.Tensor], float]:
        terms = []
        for group in groups:
            for (sample, _), advantage in zip(group, _advantages(group), strict=True):
                good = float(advantage.clamp(-advantage_limit, advantage_limit)) / advantage_limit / 2 + 0.5
                for step in sample.steps.tolist():
                    x0, x = self.noised(sample, step)
                    sigma = sample.sigmas[step]
                    v, old_v = self.velocity_at(self.model, sample, x, sigma), old[sample.id, step]
                    with torch.no_grad():
                        reference = self.velocity_at(self.start, sample, x, sigma)
                    errors = []
                    for implicit in ((1 - mixture) * old_v + mixture * v, (1 + mixture) * old_v - mixture * v):
                        error = x - sigma * implicit - x0
                        errors.append((error**2).mean() / error.detach().abs().mean())
                    loss = good * errors[0] + (1 - good) * errors[1]
                    terms.append(advantage_limit / mixture * loss + kl_coefficient * ((v - reference) ** 2).mean())
        return self.optimize(terms)


def _advantages(group: Sequence[tuple[LatentSample, float]]) -> torch.Tensor:
    rewards = torch.tensor([reward for _, reward in group])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)
