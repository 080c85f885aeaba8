"""Rules for sections `teachers` and `algorithm.distillation`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import Config


def teachers_have_distinct_names(config: Config) -> Iterator[str]:
    names = [teacher.name for teacher in config.teachers.models]
    taken = next((name for name in names if names.count(name) > 1), None)
    if taken is not None:
        yield f"teachers.models: two teachers have the name {taken}. Fix: give each teacher a different name"


def distillation_alone_needs_no_rounds(config: Config) -> Iterator[str]:
    rounds = config.batch.sampling_rounds
    if config.has_teachers and not config.has_rewards and rounds > 1:
        yield (
            f"batch.sampling_rounds={rounds}: dynamic sampling replaces prompts whose samples have equal rewards, but "
            "with rewards.functions=[] no sample has a reward. Fix: set batch.sampling_rounds=1, or add a reward"
        )


def teacher_sources_require_source_column(config: Config) -> Iterator[str]:
    named = next((teacher for teacher in config.teachers.models if teacher.sources is not None), None)
    if named is not None and config.is_offline:
        yield (
            f"teachers.models: {named.name} with sources={named.sources}: with data.format={config.data.format}, every "
            f"teacher teaches all rows. Fix: remove sources from {named.name}"
        )
    elif named is not None and config.data.source_column is None:
        yield (
            f"teachers.models: {named.name} with sources={named.sources}: the source of a row is unknown, because "
            "data.source_column=null. Fix: set data.source_column"
        )


def exact_divergence_is_in_the_loss(config: Config) -> Iterator[str]:
    key, distillation = "algorithm.distillation", config.algorithm.distillation
    if distillation.is_exact and distillation.placement != "loss":
        yield (
            f"{key}.divergence={distillation.divergence}: an exact divergence is a loss with a gradient for the whole "
            f"vocabulary, but with {key}.placement={distillation.placement} only the sampled token has a gradient. "
            f"Fix: set {key}.placement=loss, or set {key}.divergence=sampled"
        )


def exact_divergence_covers_the_vocabulary(config: Config) -> Iterator[str]:
    divergence, top_k = config.algorithm.distillation.divergence, config.rollout.top_k
    if config.algorithm.distillation.is_exact and top_k is not None:
        yield (
            f"algorithm.distillation.divergence={divergence}: an exact divergence covers the full vocabulary, but with "
            f"rollout.top_k={top_k} the policy is truncated to candidate tokens. Fix: set rollout.top_k=null and "
            "rollout.top_p=1, or set algorithm.distillation.divergence=sampled"
        )


RULES = (
    teachers_have_distinct_names,
    distillation_alone_needs_no_rounds,
    teacher_sources_require_source_column,
    exact_divergence_is_in_the_loss,
    exact_divergence_covers_the_vocabulary,
)
