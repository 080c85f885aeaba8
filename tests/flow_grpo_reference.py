"""Reference Flow-GRPO in plain diffusers and torch, written from the papers: one denoising step at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.core.latents import LatentSample
from megarl.megatron.model.denoiser.inputs import Document
from tests.tiny_denoiser import TinyDenoiser

Groups = Sequence[Sequence[tuple[LatentSample, float]]]
"""The images of each prompt with their rewards."""


class FlowGrpoReference:
    """A model trained by AdamW on GRPO's clipped loss of denoising steps (arXiv 2505.05470), with classifier-free
    guidance and the exact KL to the initial model."""

    def __init__(self, tiny: TinyDenoiser, folder: Path, *, lr: float, eps: float, guidance: float, noise_level: float):
        self.tiny = tiny
        self.model, self.start = (tiny.load(folder) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, eps=eps, weight_decay=0.0)
        self.guidance, self.noise_level = guidance, noise_level

    def velocity(self, model: torch.nn.Module, sample: LatentSample, index: int) -> torch.Tensor:
        """Return the velocity of a trained step under guidance."""
        dtype = torch.get_default_dtype()
        x, sigma = torch.tensor(sample.latents[index], dtype=dtype), float(sample.sigmas[sample.steps[index]])
        captions = [caption.map(torch.tensor).to(dtype) for caption in (sample.embedding, sample.empty_embedding)]
        conditional, unconditional = self.tiny.velocities(model, [Document(x, sigma, caption) for caption in captions])
        return unconditional + self.guidance * (conditional - unconditional)

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
        """Run one optimizer step. Return the loss, the gradients before clipping by name, and the gradient norm."""
        self.optimizer.zero_grad()
        terms = []
        for group in groups:
            rewards = torch.tensor([reward for _, reward in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for (sample, _), advantage in zip(group, advantages, strict=True):
                for k in range(len(sample.steps)):
                    ratio = (self.log_prob(sample, k) - old[sample.id, k]).exp()
                    clipped = ratio.clamp(1 - clip, 1 + clip)
                    with torch.no_grad():
                        reference = self.gaussian(self.start, sample, k)
                    policy = self.gaussian(self.model, sample, k)
                    kl = torch.distributions.kl_divergence(policy, reference).mean()
                    terms.append(-torch.minimum(ratio * advantage, clipped * advantage) + kl_coefficient * kl)
        loss = torch.stack(terms).mean()
        loss.backward()
        trained = self.model.named_parameters()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach()), gradients, float(norm)
