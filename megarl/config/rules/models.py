"""Rules for section `critic`, for all trained models, and for all models with their own ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.learning_rate import num_updates
from megarl.config.model_schema import Placed, Trained, layout_key
from megarl.config.schema import Config


def critic_warmup_ends_before_the_run(config: Config) -> Iterator[str]:
    warmup, steps = config.critic.warmup_steps, config.run.steps
    if config.has_critic and warmup >= steps:
        yield (
            f"critic.warmup_steps={warmup}: the actor would never be trained, because run.steps={steps}. Fix: set "
            f"critic.warmup_steps below {steps}"
        )


def fp8_needs_bfloat16(config: Config, trained: Trained) -> Iterator[str]:
    dtype, key = config.model.dtype, f"{trained.section}.fp8"
    if trained.fp8 is not None and dtype != "bfloat16":
        yield (
            f"{key}={trained.fp8}: fp8 matrix products need parameters and activations in bfloat16, but "
            f"model.dtype={dtype}. Fix: set model.dtype=bfloat16 or {key}=null"
        )


def muon_needs_float32_momentum(config: Config, trained: Trained) -> Iterator[str]:
    name, section = "use_precision_aware_optimizer", trained.section
    if trained.optimizer.name == "muon" and trained.megatron_overrides.optimizer.get(name):
        yield (
            f"{section}.megatron_overrides.optimizer.{name}=true: the override changes the dtypes of the optimizer "
            f"state, but with {section}.optimizer.name=muon the momentum must be float32. Fix: remove the override, or "
            f"set {section}.optimizer.name=adamw"
        )


def schedule_lengths_are_whole_updates(config: Config, trained: Trained) -> Iterator[str]:
    schedule = trained.optimizer.schedule
    for name, length in (("warmup", schedule.warmup), ("decay", schedule.decay)):
        if length is not None and length > 1 and length != int(length):
            yield (
                f"{trained.section}.optimizer.schedule.{name}={length:g}: a value of 1 or more is a number of updates "
                "and must be an integer. Fix: set an integer, or a fraction of the run's updates below 1"
            )


def wsd_requires_decay(config: Config, trained: Trained) -> Iterator[str]:
    schedule, prefix = trained.optimizer.schedule, f"{trained.section}.optimizer.schedule"
    if schedule.name == "wsd" and schedule.decay is None:
        yield (
            f"{prefix}.name=wsd: the length of the decay is not set ({prefix}.decay=null). Fix: set {prefix}.decay=0.2"
        )


def schedule_ends_below_its_peak(config: Config, trained: Trained) -> Iterator[str]:
    optimizer, prefix = trained.optimizer, f"{trained.section}.optimizer"
    if optimizer.schedule.min_lr > optimizer.lr:
        yield (
            f"{prefix}.schedule.min_lr={optimizer.schedule.min_lr:g}: it exceeds the peak learning rate, "
            f"{prefix}.lr={optimizer.lr:g}. Fix: set {prefix}.schedule.min_lr to at most {optimizer.lr:g}"
        )


def schedule_fits_the_run(config: Config, trained: Trained) -> Iterator[str]:
    """The warmup and the decay of the wsd schedule must not overlap."""
    schedule, total = trained.optimizer.schedule, config.num_updates(trained)
    if schedule.name != "wsd" or schedule.decay is None:
        return
    warmup, decay = num_updates(schedule.warmup, total), num_updates(schedule.decay, total)
    if warmup + decay > total:
        yield (
            f"{trained.section}.optimizer.schedule.warmup={schedule.warmup:g}, decay={schedule.decay:g}: warmup and "
            f"decay take {warmup} + {decay} = {warmup + decay} updates, but the run has only {total}. Fix: set both to "
            "fractions of the run, for example 0.1 and 0.2"
        )


def microbatch_holds_the_longest_sample(config: Config, placed: Placed) -> Iterator[str]:
    """A rank's token budget must hold its share of the longest sample: two equal chunks per context-parallel rank. Both
    samples in a pair are in the same microbatch."""
    role = placed.section
    if config.samples_images:  # the number of tokens in a denoising step depends on the model
        return
    budget, cp, (key, context) = placed.tokens_per_microbatch, placed.layout.cp, config.context_of(placed)
    together = 2 if placed is config.actor and config.algorithm.objective.spec.is_pairwise else 1
    needed = together * (-(-context // (2 * cp)) * 2 if cp > 1 else context)
    if budget >= needed:
        return
    ranks = f" on {layout_key(placed)}.cp={cp} ranks" if cp > 1 else ""
    unit, tokens = ("a sample", f"{key}={context}") if together == 1 else ("a pair", f"2 x {key}={context}")
    yield (
        f"{role}.tokens_per_microbatch={budget}: {unit} can have up to {tokens} tokens{ranks} and is never split over "
        f"microbatches ({budget} < {needed}). Fix: set {role}.tokens_per_microbatch to at least {needed}"
    )


def every_data_parallel_rank_has_a_sample(config: Config, placed: Placed) -> Iterator[str]:
    key = f"{layout_key(placed)}.dp"
    dp, prompts, per_prompt = placed.layout.dp, config.batch.prompts_per_update, config.batch.samples_per_prompt
    units, what = prompts * per_prompt, f"samples ({prompts} prompts x {per_prompt} samples)"
    if placed is config.actor and config.algorithm.objective.spec.is_pairwise:
        units, what = prompts, "pairs, which are never split"
    elif config.is_offline:
        units, what = prompts, "rows"
    if dp > units:
        yield (
            f"{key}={dp}: an update has only {units} {what}, but each data-parallel rank needs at least one. Fix: set "
            f"{key} to at most {units}, or raise batch.prompts_per_update"
        )


RULES = (critic_warmup_ends_before_the_run,)

TRAINED_RULES = (
    fp8_needs_bfloat16,
    muon_needs_float32_momentum,
    schedule_lengths_are_whole_updates,
    wsd_requires_decay,
    schedule_ends_below_its_peak,
    schedule_fits_the_run,
)

PLACED_RULES = (microbatch_holds_the_longest_sample, every_data_parallel_rank_has_a_sample)
