"""The samples and tokens of a step, as a recipe asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.model_schema import Trained
from megarl.config.schema import Config
from megarl.step.needed_passes import passes

USUAL_PROMPT = 512
"""The tokens of a prompt where nobody says, if the context has room for as many."""

USUAL_SHARE = 0.5
"""The share of the longest response that the mean one has, where nobody says."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step.

    samples            rollouts of a step; of offline data, its samples
    prompts            prompts that they answer, each computed once by an engine
    prompt_tokens      tokens of a prompt, the mean
    response_tokens    tokens of a response, the mean
    longest_response   tokens of the longest, for which all others wait
    trained            samples that the models are trained on
    sharing            those of them that have a prompt in common, which a microbatch computes once for all it has
    updates            optimizer steps of an epoch
    epochs             how often actor and critic go through the samples
    passes             forward passes of the actor over them, before its updates
    is_offline         whether the responses are given, so that nothing is sampled
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
        """Return the work of a recipe's step, without further rounds of dynamic sampling. The means are assumed where
        they are not given: USUAL_PROMPT, and USUAL_SHARE of the longest response."""
        batch, context = config.batch, config.rollout.context_length
        longest = min(config.rollout.max_new_tokens, context - 1)
        prompt = min(USUAL_PROMPT, context - longest) if prompt_tokens is None else prompt_tokens
        response = USUAL_SHARE * longest if response_tokens is None else min(response_tokens, longest)
        trained = batch.prompts_per_step * config.trained_per_prompt
        sampled = batch.prompts_per_step * (batch.samples_per_prompt + config.samples_greedily)
        of_actor = [p for p in passes(config) if p.needed and p.name in ("old log-probs", "reference log-probs")]
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
            passes=len(of_actor),
            is_offline=config.is_offline,
        )

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_tokens(self) -> float:
        return self.trained * self.sample_tokens

    def packed(self, settings: Trained) -> Packed:
        """Return how a model packs the samples of an update, with microbatches as full as they may be."""
        layout, budget = settings.layout, settings.tokens_per_microbatch * settings.layout.cp
        of_replica = self.trained / self.updates / layout.dp
        room = (budget - self.prompt_tokens) / max(1.0, self.response_tokens)
        # Under context parallelism, Transformer Engine's attention gives every sample its own prompt.
        together = max(1.0, min(self.sharing, room, of_replica)) if layout.cp == 1 else 1.0
        prompt, response = self.prompt_tokens, self.response_tokens
        tokens = prompt / together + response
        count = max(1, -(-int(of_replica * tokens) // budget))
        return Packed(
            microbatches=count,
            tokens=of_replica * tokens / count,
            scored_share=response / tokens,
            pairs_per_token=(prompt**2 / together + 2 * prompt * response + response**2) / 2 / tokens,
        )

    def describe(self) -> str:
        said = (
            f"{self.trained:,} samples, {self.prompt_tokens:,.0f} + {self.response_tokens:,.0f} tokens on average, "
            f"{self.trained_tokens / 1e6:,.2f} million in all, in {self.updates} "
            f"{'update' if self.updates == 1 else 'updates'}"
            f"{'' if self.epochs == 1 else f', in each of {self.epochs} epochs'}"
        )
        return said if self.is_offline else f"{said}; the longest response has {self.longest_response:,.0f}"


@dataclass(frozen=True, slots=True)
class Packed:
    """The microbatches of a replica in one update.

    microbatches      their number
    tokens            tokens of each, the mean
    scored_share      the share of tokens that are of responses
    pairs_per_token   tokens that a token attends to, the mean
    """

    microbatches: int
    tokens: float
    scored_share: float
    pairs_per_token: float
