"""Rules for section `algorithm.correction`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def mask_bounds_are_ordered(config: Config) -> str | None:
    low, high = config.algorithm.correction.mask_low, config.algorithm.correction.mask_high
    if low < high:
        return None
    return (
        f"algorithm.correction.mask_low={low:g}: it must be below algorithm.correction.mask_high={high:g}, or no token "
        f"is kept. Fix: set algorithm.correction.mask_low below {high:g}"
    )


def weight_bounds_are_ordered(config: Config) -> str | None:
    floor, limit = config.algorithm.correction.weight_floor, config.algorithm.correction.weight_limit
    if floor is None or limit is None or floor < limit:
        return None
    return (
        f"algorithm.correction.weight_floor={floor:g}: it must be below algorithm.correction.weight_limit={limit:g}. "
        f"Fix: set algorithm.correction.weight_floor below {limit:g}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    mask_bounds_are_ordered,
    weight_bounds_are_ordered,
)
