"""The rules of each section of a trained model."""

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
        f"{key}={trained.fp8}: its matrix products are between parameters and activations in bfloat16, and "
        f"model.dtype={dtype}; set model.dtype=bfloat16 or {key}=null"
    )


def schedule_lengths_are_whole_updates(config: Config, trained: Trained) -> str | None:
    schedule = trained.optimizer.schedule
    for name, length in (("warmup", schedule.warmup), ("decay", schedule.decay)):
        if length is not None and length > 1 and length != int(length):
            return (
                f"{trained.section}.optimizer.schedule.{name}={length:g}: from 1 on this counts updates; give a whole "
                "number, or a share of the run's updates below 1"
            )
    return None


def schedule_has_the_keys_of_its_name(config: Config, trained: Trained) -> str | None:
    """The key decay belongs to wsd, which needs it, and min_lr to the schedules that decay."""
    schedule = trained.optimizer.schedule
    name, prefix = schedule.name, f"{trained.section}.optimizer.schedule"
    if name == "wsd" and schedule.decay is None:
        return f"{prefix}.name=wsd: it needs the length of its decay; set {prefix}.decay=0.2"
    return None


def schedule_ends_below_its_peak(config: Config, trained: Trained) -> str | None:
    optimizer, prefix = trained.optimizer, f"{trained.section}.optimizer"
    if optimizer.schedule.min_lr <= optimizer.lr:
        return None
    return (
        f"{prefix}.schedule.min_lr={optimizer.schedule.min_lr:g}: the schedule decays to it from "
        f"{prefix}.lr={optimizer.lr:g}; set min_lr to at most {optimizer.lr:g}"
    )


def schedule_fits_the_run(config: Config, trained: Trained) -> str | None:
    """Warm-up and decay of wsd do not overlap."""
    schedule, total = trained.optimizer.schedule, config.num_updates(trained)
    if schedule.name != "wsd" or schedule.decay is None:
        return None
    warmup, decay = num_updates(schedule.warmup, total), num_updates(schedule.decay, total)
    if warmup + decay <= total:
        return None
    return (
        f"{trained.section}.optimizer.schedule.warmup={schedule.warmup:g}, decay={schedule.decay:g}: "
        f"{warmup} + {decay} = {warmup + decay} updates, but in the run there are {total}; give both as shares of the "
        "run, such as 0.1 and 0.2"
    )


RULES: tuple[Callable[[Config, Trained], str | None], ...] = (
    fp8_needs_bfloat16,
    schedule_lengths_are_whole_updates,
    schedule_has_the_keys_of_its_name,
    schedule_ends_below_its_peak,
    schedule_fits_the_run,
)
