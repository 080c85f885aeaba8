"""The list of `megarl algorithms`: estimators, objectives, KL forms, aggregations, and the options that each reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.specs import COMPARISONS
from megarl.config.document import show
from megarl.config.schema import KL, Correction, Objective


def describe() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from _advantages()
    yield from _objectives()
    yield "algorithm.value, for estimator=gae"
    yield "    coefficient, clip, aggregation=one of these"
    yield from _kl()
    yield "algorithm.correction, of what lies between the policy that sampled and the old one"
    yield from (f"    {_choices(Correction, key)}" for key in ("old", "weight", "mask"))
    yield "    weight_limit with a weight, mask_low and mask_high with a mask"


def _advantages() -> Iterator[str]:
    yield "algorithm.advantage.estimator, with r_i the reward of sample i, and its options in algorithm.advantage"
    for name, estimator in ESTIMATORS.items():
        yield f"  {name}: {estimator.formula}"
        yield f"    {estimator.paper}; {COMPARISONS[estimator.comparison]}"
        yield f"    {_given(estimator.options)}"
    always = " and ".join(name for name, estimator in ESTIMATORS.items() if "credit" not in estimator.options)
    yield "  credit=whole | to_go: of rewards of single tokens, a reward model's or PRIME's, arXiv 2502.01456, and of"
    yield f"    a KL in the reward; {always}: always to_go"


def _objectives() -> Iterator[str]:
    yield "algorithm.objective.name, with ρ = π / π_old and A the advantage, and its options in algorithm.objective"
    for name, objective in OBJECTIVES.items():
        yield f"  {name}: {objective.formula}"
        yield f"    {objective.paper}"
        yield f"    data.rows={' | '.join(objective.rows)}; {_given(objective.options)}"
    yield "algorithm.objective, beside any that learns from advantages"
    yield "    entropy_coefficient, skip_truncated (DAPO), imitation_coefficient and imitation_above (VAPO)"
    yield f"    {_choices(Objective, 'empty_samples')} (sft, too)"
    yield "algorithm.objective.aggregation: the weight of a token in the loss of an update"
    yield from (f"  {name}: {aggregation.formula}" for name, aggregation in AGGREGATIONS.items())


def _kl() -> Iterator[str]:
    yield "algorithm.kl.estimator, with d = log π − log π_ref, for any of algorithm.kl"
    yield from (f"  {name}: {estimator.formula}" for name, estimator in KL_ESTIMATORS.items())
    yield f"    {_choices(KL, 'placement')}, {_choices(KL, 'level')}, straight_through=true | false"
    yield "    coefficient, fixed or moved by adaptive_target and adaptive_horizon"
    yield "    renew_steps and renew_share, of the reference"


def _given(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={show(value)}" for name, value in options.items()) or "no options"


def _choices(section: type[KL | Correction | Objective], key: str) -> str:
    """Returns KEY=CHOICES for a key whose type is a Literal, optional or not."""
    annotation = section.model_fields[key].annotation
    values = [value for part in get_args(annotation) for value in (get_args(part) or (part,))]
    return f"{key}={' | '.join('null' if value is type(None) else str(value) for value in values)}"
