"""Rules for all sections of trained models."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.learning_rate import num_updates
from megarl.config.model_schema import Trained
from megarl.config.schema import Config


def fp8_needs_bfloat16(config: Config, trained: Trained) -> str | None:
    dtype = config.model.dtype
    if trained.fp8 is None or dtype == "bfloat16":
        return None
    key = f"{trained.section}.fp8"
    return (
        f"{key}={trained.fp8}: fp8 matrix products need parameters and activations in bfloat16, but "
        f"model.dtype={dtype}. Fix: set model.dtype=bfloat16 or {key}=null"
    )


def schedule_lengths_are_whole_updates(config: Config, trained: Trained) -> str | None:
    schedule = trained.optimizer.schedule
    for name, length in (("warmup", schedule.warmup), ("decay", schedule.decay)):
        if length is not None and length > 1 and length != int(length):
            return (
                f"{trained.section}.optimizer.schedule.{name}={length:g}: a value of 1 or more is a number of updates "
                "and must be an integer. Fix: set an integer, or a fraction of the run's updates below 1"
            )
    return None


def wsd_requires_decay(config: Config, trained: Trained) -> str | None:
    schedule, prefix = trained.optimizer.schedule, f"{trained.section}.optimizer.schedule"
    if schedule.name == "wsd" and schedule.decay is None:
        return (
            f"{prefix}.name=wsd: the length of the decay is not set ({prefix}.decay=null). Fix: set {prefix}.decay=0.2"
        )
    return None


def schedule_ends_below_its_peak(config: Config, trained: Trained) -> str | None:
    optimizer, prefix = trained.optimizer, f"{trained.section}.optimizer"
    if optimizer.schedule.min_lr <= optimizer.lr:
        return None
    return (
        f"{prefix}.schedule.min_lr={optimizer.schedule.min_lr:g}: it exceeds the peak learning rate, "
        f"{prefix}.lr={optimizer.lr:g}. Fix: set {prefix}.schedule.min_lr to at most {optimizer.lr:g}"
    )


def schedule_fits_the_run(config: Config, trained: Trained) -> str | None:
    """The warmup and the decay of the wsd schedule must not overlap."""
    schedule, total = trained.optimizer.schedule, config.num_updates(trained)
    if schedule.name != "wsd" or schedule.decay is None:
        return None
    warmup, decay = num_updates(schedule.warmup, total), num_updates(schedule.decay, total)
    if warmup + decay <= total:
        return None
    return (
        f"{trained.section}.optimizer.schedule.warmup={schedule.warmup:g}, decay={schedule.decay:g}: warmup and decay "
        f"have {warmup} + {decay} = {warmup + decay} updates, but the run has only {total}. Fix: set both to fractions "
        "of the run, for example 0.1 and 0.2"
    )


RULES: tuple[Callable[[Config, Trained], str | None], ...] = (
    fp8_needs_bfloat16,
    schedule_lengths_are_whole_updates,
    wsd_requires_decay,
    schedule_ends_below_its_peak,
    schedule_fits_the_run,
)
