"""Reference GRPO in plain Hugging Face and torch, written from the papers: one sample at a time, not packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megarl.core.sample import Sample
from tests.closeness import load


class GrpoReference:
    """A model trained by AdamW on GRPO's loss with the sample standard deviation (arXiv 2402.03300, eq. 3 and 4)."""

    def __init__(self, folder: Path, lr: float, eps: float, temperature: float, kind: type = AutoModelForCausalLM):
        self.model, self.start = (load(kind, folder) for _ in range(2))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.999), eps=eps, weight_decay=0.0
        )
        self.temperature = temperature

    def log_probs(self, model: torch.nn.Module, sample: Sample) -> torch.Tensor:
        logits = self.logits(model, sample)
        for i, kept in enumerate(sample.candidate_ids or ()):
            if len(kept):
                others = torch.ones_like(logits, dtype=torch.bool)
                others[:, [sample.response_ids[i], *kept]] = False
                logits = logits.masked_fill(others & (torch.arange(len(logits)) == i)[:, None], -torch.inf)
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids).long()[:, None])[:, 0]

    def logits(self, model: torch.nn.Module, sample: Sample) -> torch.Tensor:
        """Return the logits [R, V] of the response tokens at the sampling temperature."""
        ids = torch.tensor(sample.token_ids[None]).long()
        return model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1] / self.temperature

    def loss(
        self, groups: Sequence[Sequence[tuple[Sample, float]]], kl_coefficient: float, old: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return −min(ρA, clip(ρ)A) + β·k3, averaged over the trained tokens of each sample and then over samples."""
        terms = []
        for group in groups:
            rewards = torch.tensor([reward for _, reward in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for (sample, _), advantage in zip(group, advantages, strict=True):
                log_prob = self.log_probs(self.model, sample)
                ratio = (log_prob - old.get(sample.id, log_prob.detach())).exp()
                token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if kl_coefficient:
                    with torch.no_grad():
                        reference = self.log_probs(self.start, sample)
                    token = token + kl_coefficient * ((reference - log_prob).exp() - 1 - (reference - log_prob))
                mask = torch.tensor(sample.response_mask)
                terms.append(token[mask].mean() if mask.any() else token.sum() * 0)
        return torch.stack(terms).mean()

    def update(self, groups, kl_coefficient: float, clip_norm: float, old=None) -> tuple[float, dict, float]:
        """Run one optimizer step. Return the loss, the gradients before clipping by name, and the gradient norm."""
        self.optimizer.zero_grad()
        loss = self.loss(groups, kl_coefficient, old or {})
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        self.optimizer.step()
        return float(loss.detach()), gradients, float(norm)
