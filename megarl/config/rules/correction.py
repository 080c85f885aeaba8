"""Rules for section `algorithm.correction`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def correction_keeps_some_tokens(config: Config) -> str | None:
    low, high = config.algorithm.correction.mask_low, config.algorithm.correction.mask_high
    if low < high:
        return None
    return (
        f"algorithm.correction.mask_low={low:g}: no ratio lies between it and mask_high={high:g}. Fix: set mask_low "
        f"below {high:g}"
    )


def weights_have_a_range(config: Config) -> str | None:
    floor, limit = config.algorithm.correction.weight_floor, config.algorithm.correction.weight_limit
    if floor is None or limit is None or floor < limit:
        return None
    return (
        f"algorithm.correction.weight_floor={floor:g}: the range of weights up to weight_limit="
        f"{limit:g} is empty. Fix: set weight_floor below {limit:g}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    correction_keeps_some_tokens,
    weights_have_a_range,
)
