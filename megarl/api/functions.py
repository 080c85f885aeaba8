"""The algorithms as pure functions of tensors and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, ValidationError, create_model

from megarl.algorithms.aggregation import AGGREGATIONS, sample_weights
from megarl.algorithms.baselines import Member
from megarl.algorithms.kl import KL_ESTIMATORS, estimate
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.relative import mean_and_std
from megarl.algorithms.specs import (
    EstimatorSpec,
    GroupEstimator,
    PolicyObjective,
    SampleEstimator,
    Spec,
    TokenAdvantages,
    TokenEstimator,
)
from megarl.core.errors import UserError
from megarl.core.score import RewardPart
from megarl.data.packing import Lengths, Microbatch, Packing, schedule
from megarl.models.token_cost import TokenCost

if TYPE_CHECKING:
    import torch


def compute_advantages(
    estimator: str,
    rewards: Sequence[Sequence[float | Mapping[str, float]]],
    *,
    weights: Mapping[str, float] | None = None,
    num_tokens: Sequence[Sequence[int]] | None = None,
    greedy: Sequence[float] | None = None,
    average: float = 0.0,
    **options: Any,
) -> list[list[float]]:
    """Return the advantage of each sample, nested like `rewards`.

    Args:
        estimator: an estimator with one advantage per sample, such as "grpo", "rloo" or "opo"; `megarl algorithms`
            lists them.
        rewards: one list per group (the samples of one prompt). Each sample has one reward, or rewards by name if the
            estimator compares them separately ("gdpo").
        weights: weights of the rewards by name; 1 by default.
        num_tokens: number of trained tokens of each sample, for estimators that use it; 1 by default.
        greedy: reward of the greedy response to each prompt, for "remax".
        average: the moving average of earlier rewards, for "reinforce".
        options: the estimator's options, with the paper's values as defaults.

    Raises:
        UserError: the estimator or an option is unknown or has an invalid value, or the estimator compares turns.
    """
    _require_name("estimator", estimator, ESTIMATORS)
    spec = ESTIMATORS[estimator]
    values = _with_defaults(spec, options)
    if not isinstance(spec, SampleEstimator):
        raise UserError(
            f"estimator={estimator}: computes one advantage per token. Fix: use compute_token_advantages, or an "
            f"estimator such as {', '.join(_names(SampleEstimator)[:3])}"
        )
    if isinstance(spec, GroupEstimator) and spec.compare_turns is not None:
        raise UserError(
            f"estimator={estimator}: compares turns, but compute_advantages has no turns. Fix: use an estimator such "
            "as grpo"
        )
    counts = [[1] * len(group) for group in rewards] if num_tokens is None else num_tokens
    greedy = [0.0] * len(rewards) if greedy is None else greedy
    groups = [
        [_member(reward, weights or {}, count, best, average) for reward, count in zip(group, each, strict=True)]
        for group, each, best in zip(rewards, counts, greedy, strict=True)
    ]
    factor = 1.0
    if isinstance(spec, GroupEstimator) and spec.amplify is not None:
        factor = spec.amplify(groups)
    baselines = [spec.baselines(group, values) for group in groups]
    if isinstance(spec, GroupEstimator) and (over_step := spec.normalization(groups, values)) is not None:
        baselines = [[over_step.apply(baseline) for baseline in group] for group in baselines]
    bound = inf if values["limit"] is None else values["limit"]
    advantages = [
        [
            min(max(factor * (member.reward - baseline.center) / baseline.scale, -bound), bound)
            for member, baseline in zip(group, compared, strict=True)
        ]
        for group, compared in zip(groups, baselines, strict=True)
    ]
    if not values["whiten"]:
        return advantages
    rows = zip(advantages, counts, strict=True)
    weighted = [pair for row, each in rows for pair in zip(row, each, strict=True)]
    count, total, squares = (sum(n * advantage**power for advantage, n in weighted) for power in (0, 1, 2))
    mean, std = mean_and_std(count, total, squares, values["whiten_std"])
    return [[(advantage - mean) / (std + values["whiten_epsilon"]) for advantage in row] for row in advantages]


def _member(
    rewards: float | Mapping[str, float], weights: Mapping[str, float], num_tokens: int, greedy: float, average: float
) -> Member:
    if not isinstance(rewards, Mapping):
        return Member(rewards, num_tokens, greedy=greedy, earlier=average)
    parts = {name: RewardPart(value, weights.get(name, 1.0)) for name, value in rewards.items()}
    total = sum(part.value * part.weight for part in parts.values())
    return Member(total, num_tokens, greedy=greedy, earlier=average, parts=parts)


def compute_token_advantages(
    estimator: str, rewards: torch.Tensor, mask: torch.Tensor, values: torch.Tensor | None = None, **options: Any
) -> TokenAdvantages:
    """Return the advantage of each token and the critic's targets, float32 [B, T], both 0 where the mask is false.
    The targets are None without `values`. The advantages are not whitened.

    Args:
        estimator: an estimator with one advantage per token, such as "gae" or "reinforce_plus_plus".
        rewards: float32 [B, T], rewards per token. Add the reward of a whole sample to its last token.
        mask: bool [B, T], true for trained tokens.
        values: float32 [B, T], the critic's values, for "gae".
        options: the estimator's options, with the paper's values as defaults.

    Raises:
        UserError: the estimator or an option is unknown or has an invalid value.
    """
    _require_name("estimator", estimator, ESTIMATORS)
    spec = ESTIMATORS[estimator]
    chosen = _with_defaults(spec, options)
    if not isinstance(spec, TokenEstimator):
        raise UserError(f"estimator={estimator}: computes one advantage per sample. Fix: use compute_advantages")
    if (values is None) == (spec.comparison == "values"):
        fix = "pass values" if values is None else "omit values"
        raise UserError(f"estimator={estimator}: {'needs' if values is None else 'does not use'} values. Fix: {fix}")
    named = {} if values is None else {"value": values.flatten()}
    arguments = rewards.flatten(), mask.flatten(), _row_sample(mask)
    advantages, returns = spec.estimate(*arguments, **named, **{name: chosen[name] for name in spec.parameters})
    shape = rewards.shape
    return TokenAdvantages(advantages.reshape(shape), None if returns is None else returns.reshape(shape))


def policy_loss(
    objective: str,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    aggregation: str = "token_mean",
    prompts: Sequence[str] | None = None,
    max_tokens: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the loss of one update, a scalar that is differentiable in log_probs: Σ w·ℓ over the trained tokens.

    Args:
        objective: a policy objective, such as "clip", "gspo" or "cispo"; `megarl algorithms` lists them.
        log_probs, old_log_probs: float32 [B, T], the numerator and the denominator of the policy ratio.
        advantages: float32, [B] or [B, T].
        mask: bool [B, T], true for trained tokens.
        aggregation: how token losses are combined; `megarl algorithms` lists the modes.
        prompts: prompt of each sample, for "prompt_mean_of_token_means".
        max_tokens: maximum length of a response, for "sequence_mean_over_max_tokens"; T by default.
        options: the objective's options, with the paper's values as defaults.

    Raises:
        UserError: the objective, the aggregation or an option is unknown or has an invalid value.
    """
    from megarl.algorithms.sample_segments import SampleSegments

    _require_name("objective", objective, OBJECTIVES)
    spec = OBJECTIVES[objective]
    chosen = _with_defaults(spec, options)
    if not isinstance(spec, PolicyObjective) or spec.selection is not None or "tokens" not in spec.actions:
        reason = "selects tokens of the whole update" if spec.selects_tokens else "has no per-token ratio"
        raise UserError(
            f"objective={objective}: {reason}, so it cannot be computed from these tensors. Fix: use an objective "
            "such as clip"
        )
    _require_name("aggregation", aggregation, AGGREGATIONS)
    num_samples, longest = mask.shape
    rows = _row_sample(mask)[mask.flatten()]
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(mask.shape)
    segments = SampleSegments(mask.new_ones(len(rows)), rows, num_samples)
    inputs = [segments] if "samples" in spec.inputs else []
    tensors = (each[mask] for each in (log_probs, old_log_probs, advantages))
    losses = spec.loss(*tensors, *inputs, **{name: chosen[name] for name in spec.parameters}).loss
    names = list(map(str, range(num_samples))) if prompts is None else list(prompts)
    counts = mask.sum(1).tolist()
    weights = log_probs.new_tensor(sample_weights(aggregation, counts, names, max_tokens or longest))
    return (weights[rows] * losses).sum()


def kl_divergence(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, *, estimator: str = "k3", straight_through: bool = False
) -> torch.Tensor:
    """Return an estimate of KL(π ‖ π_ref) for each token sampled from π, in the shape of log_probs.

    Args:
        estimator: "k1", "k2", "k3" or "abs"; see http://joschu.net/blog/kl-approx.html.
        straight_through: use the gradient of k2, whose expectation is the gradient of the divergence.

    Raises:
        UserError: the estimator is unknown.
    """
    _require_name("estimator", estimator, KL_ESTIMATORS)
    return estimate(estimator, log_probs - reference_log_probs, straight_through)


def pack_samples(
    lengths: Sequence[tuple[int, int]],
    token_budget: int,
    *,
    num_ranks: int = 1,
    prompts: Sequence[str] | None = None,
) -> list[list[Microbatch]]:
    """Assign samples to microbatches and microbatches to data-parallel ranks. Return the sample indices of each
    microbatch, by rank. All ranks have the same number of microbatches.

    Args:
        lengths: (prompt tokens, response tokens) of each sample.
        token_budget: maximum number of tokens in a microbatch.
        num_ranks: number of data-parallel ranks.
        prompts: prompt of each sample. If given, samples of the same prompt in a microbatch share its tokens.

    Raises:
        UserError: a sample is longer than the token budget.
    """
    packing = Packing(token_budget, num_ranks, prompts is not None, 1, 1, 1, TokenCost(attended=0.0, scored=0.0))
    names = range(len(lengths)) if prompts is None else prompts
    return schedule([Lengths(name, *each) for name, each in zip(names, lengths, strict=True)], packing)


def _row_sample(mask: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1])


def _names(kind: type[EstimatorSpec]) -> list[str]:
    return [name for name, spec in ESTIMATORS.items() if isinstance(spec, kind)]


def _require_name(key: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise UserError(f"{key}={name}: unknown. Fix: use one of {', '.join(names)}")


def _with_defaults(spec: Spec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an estimator's or objective's options. Raise UserError for an unknown or invalid option."""
    parameters: dict[str, Any] = dict(spec.all_parameters)
    model = create_model(spec.name, __config__=ConfigDict(extra="forbid"), **parameters)
    try:
        return model.model_validate(options).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0])
        reason = f"{spec.name} has no such option" if first["type"] == "extra_forbidden" else first["msg"]
        raise UserError(
            f"{option}={options[option]!r}: {reason}. Fix: use the options that `megarl algorithms {spec.name}` prints"
        ) from None
