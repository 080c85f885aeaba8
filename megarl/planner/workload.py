"""The number of samples and tokens that a recipe processes per step."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.model_schema import Trained
from megarl.config.schema import Config
from megarl.step.needed_passes import passes

USUAL_PROMPT = 512
"""Default mean number of tokens per prompt. A lower value is used if the context is shorter."""

USUAL_SHARE = 0.5
"""Default mean response length as a fraction of the maximum response length."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work in one step.

    Attributes:
        samples: number of rollouts per step, or number of samples per step for offline data.
        prompts: number of prompts per step. An engine processes each prompt once.
        longest_response: number of tokens in the longest response, for which the step waits.
        trained: number of samples that the models train on.
        sharing: number of trained samples per prompt. A microbatch processes their common prompt only once.
        updates: number of optimizer steps per epoch.
        epochs: number of times that actor and critic train on each sample.
        passes: number of forward-only passes through the actor before its updates.
        is_offline: whether the run trains on offline data and therefore samples no rollouts.
    """

    samples: int
    prompts: int
    prompt_tokens: float
    response_tokens: float
    longest_response: float
    trained: int
    sharing: int
    updates: int
    epochs: int
    passes: int
    is_offline: bool

    @classmethod
    def of(cls, config: Config, prompt_tokens: float | None = None, response_tokens: float | None = None) -> Workload:
        """Return the work in one step of a recipe, excluding additional rounds of dynamic sampling.

        Args:
            prompt_tokens: mean number of tokens per prompt. Default: USUAL_PROMPT.
            response_tokens: mean number of tokens per response. Default: the fraction USUAL_SHARE of the maximum.
        """
        batch, context = config.batch, config.rollout.context_length
        longest = min(config.rollout.max_new_tokens, context - 1)
        prompt = min(USUAL_PROMPT, context - longest) if prompt_tokens is None else prompt_tokens
        response = USUAL_SHARE * longest if response_tokens is None else min(response_tokens, longest)
        trained = batch.prompts_per_step * config.trained_per_prompt
        sampled = batch.prompts_per_step * (batch.samples_per_prompt + config.samples_greedily)
        actor_passes = [p for p in passes(config) if p.needed and p.name in ("old log-probs", "reference log-probs")]
        return cls(
            samples=trained if config.is_offline else sampled,
            prompts=batch.prompts_per_step,
            prompt_tokens=prompt,
            response_tokens=response,
            longest_response=longest,
            trained=trained,
            sharing=config.trained_per_prompt,
            updates=batch.prompts_per_step // batch.prompts_per_update,
            epochs=batch.epochs,
            passes=len(actor_passes),
            is_offline=config.is_offline,
        )

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_tokens(self) -> float:
        return self.trained * self.sample_tokens

    def packed(self, settings: Trained) -> Packed:
        """Return the microbatches into which a model packs the samples of an update, assuming full microbatches."""
        layout, budget = settings.layout, settings.tokens_per_microbatch * settings.layout.cp
        replica_samples = self.trained / self.updates / layout.dp
        capacity = (budget - self.prompt_tokens) / max(1.0, self.response_tokens)
        # With context parallelism, attention in Transformer Engine needs a copy of the prompt for each sample.
        per_prompt = max(1.0, min(self.sharing, capacity, replica_samples)) if layout.cp == 1 else 1.0
        prompt, response = self.prompt_tokens, self.response_tokens
        tokens = prompt / per_prompt + response
        count = max(1, -(-int(replica_samples * tokens) // budget))
        return Packed(
            microbatches=count,
            tokens=replica_samples * tokens / count,
            scored_share=response / tokens,
            pairs_per_token=(prompt**2 / per_prompt + 2 * prompt * response + response**2) / 2 / tokens,
        )

    def describe(self) -> str:
        text = (
            f"{self.trained:,} samples with {self.prompt_tokens:,.0f} + {self.response_tokens:,.0f} tokens on average, "
            f"{self.trained_tokens / 1e6:,.2f} million in total, in {self.updates} "
            f"{'update' if self.updates == 1 else 'updates'}"
            f"{'' if self.epochs == 1 else f' in each of {self.epochs} epochs'}"
        )
        return text if self.is_offline else f"{text}; the longest response has {self.longest_response:,.0f} tokens"


@dataclass(frozen=True, slots=True)
class Packed:
    """The microbatches that one replica processes in one update.

    Attributes:
        scored_share: fraction of tokens that belong to responses.
        pairs_per_token: mean number of tokens to which a token attends.
    """

    microbatches: int
    tokens: float
    scored_share: float
    pairs_per_token: float
