"""Rules for all sections of models with their own ranks."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.model_schema import Placed
from megarl.config.schema import Config


def microbatch_holds_the_longest_sample(config: Config, placed: Placed) -> str | None:
    """A rank's token budget must hold its share of the longest sample: two equal chunks per context-parallel rank. Both
    samples in a pair are in the same microbatch."""
    role = placed.section
    budget, cp, (key, context) = placed.tokens_per_microbatch, placed.layout.cp, config.context_of(placed)
    together = 2 if placed is config.actor and config.algorithm.objective.spec.is_pairwise else 1
    needed = together * (-(-context // (2 * cp)) * 2 if cp > 1 else context)
    if budget >= needed:
        return None
    ranks = f" on {role}.layout.cp={cp} ranks" if cp > 1 else ""
    unit, tokens = ("a sample", f"{key}={context}") if together == 1 else ("a pair", f"2 x {key}={context}")
    return (
        f"{role}.tokens_per_microbatch={budget}: {unit} can have up to {tokens} tokens{ranks} and is never split over "
        f"microbatches ({budget} < {needed}). Fix: set {role}.tokens_per_microbatch to at least {needed}"
    )


def every_data_parallel_rank_has_a_sample(config: Config, placed: Placed) -> str | None:
    role = placed.section
    dp, prompts, per_prompt = placed.layout.dp, config.batch.prompts_per_update, config.batch.samples_per_prompt
    units, what = prompts * per_prompt, f"samples ({prompts} prompts x {per_prompt} samples)"
    if placed is config.actor and config.algorithm.objective.spec.is_pairwise:
        units, what = prompts, "pairs, which are never split"
    elif config.is_offline:
        units, what = prompts, "rows"
    if dp <= units:
        return None
    return (
        f"{role}.layout.dp={dp}: an update has only {units} {what}, but each data-parallel rank needs at least one. "
        f"Fix: set {role}.layout.dp to at most {units}, or raise batch.prompts_per_update"
    )


RULES: tuple[Callable[[Config, Placed], str | None], ...] = (
    microbatch_holds_the_longest_sample,
    every_data_parallel_rank_has_a_sample,
)
