"""The rules of section `algorithm.correction`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def correction_is_of_another_old_policy(config: Config) -> str | None:
    correction = config.algorithm.correction
    for name, level in (("weight", correction.weight), ("mask", correction.mask)):
        if correction.old == "rollout" and level is not None:
            return (
                f"algorithm.correction.{name}={level}: with algorithm.correction.old=rollout the old policy is the one "
                f"that sampled, and every ratio between them is 1; set {name}=null or old=trainer"
            )
    return None


def correction_keeps_some_tokens(config: Config) -> str | None:
    low, high = config.algorithm.correction.mask_low, config.algorithm.correction.mask_high
    if low < high:
        return None
    return (
        f"algorithm.correction.mask_low={low:g}: no ratio is between it and mask_high={high:g}; set mask_low below "
        f"{high:g}"
    )


def weights_have_a_range(config: Config) -> str | None:
    floor, limit = config.algorithm.correction.weight_floor, config.algorithm.correction.weight_limit
    if floor is None or limit is None or floor < limit:
        return None
    return (
        f"algorithm.correction.weight_floor={floor:g}: every weight is raised to it and cut down to weight_limit="
        f"{limit:g}; set weight_floor below {limit:g}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    correction_is_of_another_old_policy,
    correction_keeps_some_tokens,
    weights_have_a_range,
)
