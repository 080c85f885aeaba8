"""Reference PPO with a critic in plain Hugging Face and torch: one sample at a time, no packing, no parallelism.

Written from the papers: GAE (arXiv 1506.02438, eq. 16), PPO (arXiv 1707.06347, eq. 7 and 9), and the value clip of
PPO's published code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.core.sample import Sample
from tests.closeness import load

Update = Sequence[Sequence[tuple[Sample, float]]]
"""The groups of one update: samples with their rewards."""


@dataclass(frozen=True)
class PpoSettings:
    gamma: float
    gae_lambda: float
    value_clip: float | None
    whiten: bool
    lr: float
    eps: float
    temperature: float
    critic_lambda: float | None = None
    length_alpha: float | None = None
    """VAPO's α: the policy's λ is 1 − 1 / (α · response length)."""
    critic_lr: float | None = None
    """Learning rate of the critic; None: `lr`."""


class PpoReference:
    def __init__(
        self,
        actor: Path,
        critic: Path,
        settings: PpoSettings,
        token_rewards: Mapping[str, torch.Tensor] | None = None,
    ):
        """Load both models.

        Args:
            critic: a classifier's folder, or the actor's folder for a zero-initialized value head.
            token_rewards: per-token rewards by sample id; None if rewards are per sample only.
        """
        self.settings, self.token_rewards = settings, token_rewards
        self.actor = load(AutoModelForCausalLM, actor)
        self.critic = load(AutoModelForSequenceClassification, critic, num_labels=1)
        if actor == critic:
            torch.nn.init.zeros_(self.critic.score.weight)
        self.optimizers = {
            model: torch.optim.AdamW(model.parameters(), lr=lr, eps=settings.eps, weight_decay=0.0)
            for model, lr in ((self.actor, settings.lr), (self.critic, settings.critic_lr or settings.lr))
        }

    def step(self, updates: Sequence[Update]) -> tuple[float, float]:
        """Compute all values and old log-probs, then run the updates. Return the last policy and value losses."""
        samples = [item for update in updates for group in update for item in group]
        with torch.no_grad():
            old = {sample.id: self.log_probs(sample) for sample, _ in samples}
            values = {sample.id: self.values(sample) for sample, _ in samples}
        for update in updates:
            members = [item for group in update for item in group]
            estimates = {sample.id: self.estimate(sample, reward, values[sample.id]) for sample, reward in members}
            advantages = self.advantages({name: advantage for name, (advantage, _) in estimates.items()})
            policy = torch.stack([self.policy_loss(s, old[s.id], advantages[s.id]) for s, _ in members]).mean()
            value = self.mean_value_loss([self.value_losses(s, values[s.id], estimates[s.id][1]) for s, _ in members])
            self.policy_and_value(policy, value)
        return float(policy.detach()), float(value.detach())

    def policy_and_value(self, policy: torch.Tensor, value: torch.Tensor) -> None:
        """Run one optimizer step of each model on its own loss."""
        for model, loss in ((self.actor, policy), (self.critic, value)):
            self.optimizers[model].zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizers[model].step()

    def log_probs(self, sample: Sample) -> torch.Tensor:
        ids = torch.tensor(sample.token_ids[None]).long()
        first = len(sample.prompt.token_ids) - 1
        logits = self.actor(ids).logits[0] / self.settings.temperature
        return torch.log_softmax(logits, -1)[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]

    def values(self, sample: Sample) -> torch.Tensor:
        """Return the value of the state before each response token [R]."""
        ids = torch.tensor(sample.token_ids[None]).long()
        hidden = self.critic.model(ids).last_hidden_state[0]
        return self.critic.score(hidden)[len(sample.prompt.token_ids) - 1 : -1, 0]

    def estimate(self, sample: Sample, reward: float, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages and returns of the trained tokens. The last token receives the sample's reward."""
        settings, mask = self.settings, torch.tensor(sample.response_mask)
        policy_lambda, critic_lambda = settings.gae_lambda, settings.critic_lambda or settings.gae_lambda
        if settings.length_alpha is not None:
            policy_lambda = max(0.0, 1 - 1 / (settings.length_alpha * max(int(sample.response_mask.sum()), 1)))
        values = values[mask].tolist()
        rewards = [0.0] * len(values)
        if self.token_rewards is not None:
            rewards = self.token_rewards[sample.id][mask].tolist()
        rewards[-1:] = [reward + last for last in rewards[-1:]]
        deltas = [
            token_reward + settings.gamma * following - value
            for token_reward, following, value in zip(rewards, [*values[1:], 0.0], values, strict=bool(values))
        ]
        lambdas = (policy_lambda, critic_lambda)
        advantages, targets = (discounted(deltas, settings.gamma * lambda_) for lambda_ in lambdas)
        return torch.tensor(advantages), torch.tensor(targets) + torch.tensor(values)

    def advantages(self, by_sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.settings.whiten:
            return by_sample
        tokens = torch.cat(list(by_sample.values()))
        return {name: (values - tokens.mean()) / (tokens.std() + 1e-6) for name, values in by_sample.items()}

    def policy_loss(self, sample: Sample, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the clipped loss, averaged over the sample's trained tokens."""
        mask = torch.tensor(sample.response_mask)
        ratio = (self.log_probs(sample) - old)[mask].exp()
        if not mask.any():
            return ratio.sum()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    def mean_value_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean over all trained tokens."""
        return torch.cat(list(losses)).mean()

    def value_losses(self, sample: Sample, old: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        """Return the value loss of every trained token."""
        mask, clip = torch.tensor(sample.response_mask), self.settings.value_clip
        value, old = self.values(sample)[mask], old[mask]
        plain = (value - returns) ** 2
        return plain if clip is None else torch.maximum(plain, (old + (value - old).clamp(-clip, clip) - returns) ** 2)


class SharedTrunkReference(PpoReference):
    """PPO whose critic is an MLP on the actor's last hidden states, with one loss and one optimizer."""

    def __init__(self, actor: Path, head: Mapping[str, torch.Tensor], settings: PpoSettings, coefficient: float):
        """`head` holds the MLP's initial parameters, fc1 and fc2."""
        super().__init__(actor, actor, settings)
        hidden = self.actor.config.hidden_size
        self.head = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 1))
        for layer, name in ((self.head[0], "fc1"), (self.head[2], "fc2")):
            layer.load_state_dict({"weight": head[f"{name}.weight"], "bias": head[f"{name}.bias"]})
        self.coefficient = coefficient
        self.parameters = [*self.actor.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.lr, eps=settings.eps, weight_decay=0.0)

    def values(self, sample: Sample) -> torch.Tensor:
        ids = torch.tensor(sample.token_ids[None]).long()
        hidden = self.actor.model(ids).last_hidden_state[0]
        return self.head(hidden)[len(sample.prompt.token_ids) - 1 : -1, 0]

    def mean_value_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean over samples of each sample's mean over its trained tokens, as in the policy loss."""
        return torch.stack([loss.mean() if len(loss) else loss.sum() for loss in losses]).mean()

    def policy_and_value(self, policy: torch.Tensor, value: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (policy + self.coefficient * value).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def discounted(deltas: Sequence[float], discount: float) -> list[float]:
    """Return Σ_l discount^l·δ_{t+l} for each t."""
    sums: list[float] = []
    for delta in reversed(deltas):
        sums.insert(0, delta + discount * (sums[0] if sums else 0.0))
    return sums
