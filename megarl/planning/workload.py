"""The samples and tokens of a step, as a recipe asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import Config
from megarl.planning.passes import passes

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
    updates            optimizer steps
    passes             forward passes of the actor over them, before its updates
    is_offline         whether the responses are given, so that nothing is sampled
    """

    samples: int
    prompts: int
    prompt_tokens: float
    response_tokens: float
    longest_response: float
    trained: int
    updates: int
    passes: int
    is_offline: bool

    @classmethod
    def of(cls, config: Config, prompt_tokens: float | None = None, response_tokens: float | None = None) -> Workload:
        """Returns the work of a recipe's step, without further rounds of dynamic sampling. The means are assumed where
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
            updates=batch.prompts_per_step // batch.prompts_per_update,
            passes=len(of_actor),
            is_offline=config.is_offline,
        )

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_tokens(self) -> float:
        return self.trained * self.sample_tokens

    def microbatches(self, dp: int, tokens_of_a_microbatch: int) -> int:
        """Returns the microbatches of a replica in one update, as full as they may be."""
        tokens = self.trained_tokens / self.updates / dp
        return max(1, -(-int(tokens) // tokens_of_a_microbatch))

    def describe(self) -> str:
        said = (
            f"{self.trained:,} samples, {self.prompt_tokens:,.0f} + {self.response_tokens:,.0f} tokens on average, "
            f"{self.trained_tokens / 1e6:,.2f} million in all, in {self.updates} "
            f"{'update' if self.updates == 1 else 'updates'}"
        )
        return said if self.is_offline else f"{said}; the longest response has {self.longest_response:,.0f}"
