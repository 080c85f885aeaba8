"""The output of `megarl algorithms`: all estimators, objectives, KL estimators and aggregations with their options, or
one estimator or objective with the recipe lines that select it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.kl import KL_ESTIMATORS, STEP_KLS
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES, spec_in_file
from megarl.algorithms.specs import BASELINE_KINDS, EstimatorSpec, ObjectiveSpec, Options, Spec
from megarl.config.algorithm_schema import KL, Correction, Objective
from megarl.config.document import show
from megarl.core.errors import UserError
from megarl.core.user_file import is_in_file


def describe_one(name: str) -> str:
    """Return the formula, paper and recipe lines of an estimator or objective. Raise a UserError if the name is
    unknown; the message suggests valid names. name: an entry's name, or `path/to/file.py:NAME`."""
    known: dict[str, Spec] = {**ESTIMATORS, **OBJECTIVES}
    spec = spec_in_file("megarl algorithms", name, Spec)[0] if is_in_file(name) else known.get(name)
    if isinstance(spec, EstimatorSpec):
        return "\n".join(_estimator(name, spec))
    if isinstance(spec, ObjectiveSpec):
        return "\n".join(_objective(name, spec))
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    hint = f"use {close[0]}" if close else f"use one of {', '.join(known)}"
    raise UserError(f"{name}: unknown estimator or objective. Fix: {hint}")


def _estimator(name: str, spec: EstimatorSpec) -> Iterator[str]:
    yield f"algorithm.advantage.estimator={name}"
    yield f"  advantage    {spec.formula}"
    yield "  where        r_i is the reward of sample i, and r_t is the reward of token t"
    yield f"  paper        {spec.paper}"
    yield f"  baseline     {BASELINE_KINDS[spec.comparison]}"
    yield from (_RECIPE, "algorithm:", "  advantage:", f"    estimator: {name}", *_comments(spec.options))


def _objective(name: str, spec: ObjectiveSpec) -> Iterator[str]:
    yield f"algorithm.objective.name={name}"
    yield f"  loss         {spec.formula}"
    if spec.is_policy_objective:
        yield f"  where        {'' if spec.adds_noise else 'ρ = π / π_old, and '}A is the advantage"
    yield f"  paper        {spec.paper}"
    yield f"  learns from  data.format={' or '.join(spec.rows)}"
    yield f"  rows         {_rows(spec)}"
    yield _RECIPE
    if "tokens" not in spec.actions:
        yield from ("rollout:", "  engine: diffusers")
    if spec.rows[0] != "prompts":  # the default of data.format
        yield from ("data:", f"  format: {spec.rows[0]}")
    yield from ("algorithm:", "  objective:", f"    name: {name}", *_comments(spec.options))


def _rows(spec: ObjectiveSpec) -> str:
    if spec.adds_noise:
        return "sampled images with new noise"
    names = {"tokens": "tokens", "steps": "denoising steps of images"}
    return " or ".join(names[action] for action in spec.actions)


_RECIPE = "\nIn a recipe (options with their defaults):\n"


def _comments(options: Options) -> Iterator[str]:
    yield from (f"    # {name}: {show(value)}" for name, value in options.items())


def describe() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from _advantages()
    yield from _objectives()
    yield "algorithm.value, the critic's loss with estimator=gae"
    yield "    coefficient, clip, aggregation"
    yield from _kl()
    yield "algorithm.trust_region: TRPO's natural gradient instead of AdamW, arXiv 1502.05477, for name=unclipped"
    yield "    kl_limit (null: AdamW), iterations, damping, trials"
    yield "algorithm.correction: importance weights and masks for the ratio of the old to the sampling policy"
    yield from (f"    {_choices(Correction, key)}" for key in ("old", "weight", "mask"))
    yield "    weight_limit and weight_floor bound the weight, mask_low and mask_high bound the mask"


def _advantages() -> Iterator[str]:
    yield "algorithm.advantage.estimator, with options in algorithm.advantage; r_i is the reward of sample i"
    for name, estimator in ESTIMATORS.items():
        yield f"  {name}: {estimator.formula}"
        yield f"    {estimator.paper}; {BASELINE_KINDS[estimator.comparison]}"
        yield f"    {_with_defaults(estimator.options)}"
    always = " and ".join(name for name, estimator in ESTIMATORS.items() if "credit" not in estimator.options)
    yield "  credit=whole | reward_to_go: for per-token rewards (reward models, PRIME, arXiv 2502.01456) and for a KL"
    yield f"    in the reward; {always} always use reward_to_go"


def _objectives() -> Iterator[str]:
    yield "algorithm.objective.name, with options in algorithm.objective; ρ = π / π_old, and A is the advantage"
    for name, objective in OBJECTIVES.items():
        yield f"  {name}: {objective.formula}"
        yield f"    {objective.paper}"
        yield f"    data.format={' | '.join(objective.rows)}; {_rows(objective)}; {_with_defaults(objective.options)}"
    yield "algorithm.objective, options of all objectives that learn from advantages"
    yield f"    {_choices(Objective, 'step_weight')}: factor of a denoising step's loss"
    yield "    entropy_coefficient, skip_truncated (DAPO), imitation_coefficient and imitation_above (VAPO)"
    yield f"    {_choices(Objective, 'empty_samples')} (also with sft, process_reward_model and token_reward_model)"
    yield "algorithm.objective.aggregation: a token's weight in the loss of an update"
    yield from (f"  {name}: {aggregation.formula}" for name, aggregation in AGGREGATIONS.items())


def _kl() -> Iterator[str]:
    yield "algorithm.kl.estimator, where d = log π − log π_ref"
    yield from (f"  {name}: {estimator.formula}" for name, estimator in KL_ESTIMATORS.items())
    yield "  of denoising steps, where v is the velocity:"
    yield from (f"  {name}: {formula}" for name, formula in STEP_KLS.items())
    yield f"    {_choices(KL, 'placement')}, {_choices(KL, 'level')}, straight_through=true | false"
    yield "    estimator=null: k1 in the reward, k3 in the loss (k2 with level=sequence); for images"
    yield "    gaussian, or velocity with diffusion_nft"
    yield "    limit bounds the estimate; adaptive_target and adaptive_horizon adapt the coefficient"
    yield "    renew_steps and renew_share update the reference"


def _with_defaults(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={show(value)}" for name, value in options.items()) or "no options"


def _choices(section: type[KL | Correction | Objective], key: str) -> str:
    """Return KEY=CHOICES for a key whose type is a Literal or an optional Literal."""
    annotation = section.model_fields[key].annotation
    values = [value for part in get_args(annotation) for value in (get_args(part) or (part,))]
    return f"{key}={' | '.join('null' if value is type(None) else str(value) for value in values)}"
