"""Metrics of a whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from megarl.algorithms.value_loss import explained_variance
from megarl.config.schema import Config
from megarl.core.completion import NO_DRAFTS
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef
from megarl.core.timing import Stopwatch
from megarl.environments.protocol import StopReason


def step_metrics(
    config: Config, groups: Sequence[Sequence[SampleRef]], watch: Stopwatch, version: int
) -> dict[str, float]:
    """Return metrics on the step's samples, phase durations and weight versions. `groups` contains all samples, grouped
    by prompt. Metrics of responses and of weight versions exclude given responses. Length metrics also exclude greedy
    rollouts, which are not trained on."""
    members = [sample for group in groups for sample in group]
    samples = sampled = [sample for sample in members if not sample.is_given]
    if config.samples_greedily:
        greedy = {group[-1].rollout_id for group in groups}
        sampled = [sample for sample in samples if sample.rollout_id not in greedy]
    times = watch.metrics()
    seconds = times["time/step"]
    if config.samples_images:
        of_samples = {"throughput/images_per_second": len(samples) / seconds}
    else:
        rate = sum(sample.num_tokens for sample in members) / seconds
        of_samples = _response_metrics(sampled) | _rollout_metrics(sampled) | {"throughput/tokens_per_second": rate}
        drafts = sum((sample.drafts for sample in sampled), NO_DRAFTS)
        of_samples |= drafts.metrics("rollout/draft_accepted_frac", "rollout/accepted_length_mean")
    if config.trains_given_responses:
        of_samples["distillation/on_policy_frac"] = len(samples) / len(members)
    return {
        **of_samples,
        **times,
        "weights/version": version,
        **_version_metrics(samples, version - 1, config.rollout.max_staleness),
    }


def update_rate(metrics: Mapping[str, Metric]) -> float:
    """Return the mean learning rate over the actor updates in a step. It is 0 if the step had no actor updates, if all
    were skipped, or if the gradient was 0. metrics: the step's training metrics."""
    has_learned = "policy/grad_norm" in metrics and metrics["policy/grad_norm"].value > 0
    return metrics["policy/lr"].value if has_learned else 0.0


def add_explained_variance(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Replace the moments of returns and residuals with the explained variance of the critic's values before the step.
    The metric is absent if all returns are equal."""
    names = ("value/return_mean", "value/return_square_mean", "value/residual_mean", "value/residual_square_mean")
    if any(name not in metrics for name in names):
        return dict(metrics)
    share = explained_variance(*(metrics[name].value for name in names))
    rest = {name: metric for name, metric in metrics.items() if name not in names[1:]}
    return rest if share is None else rest | {"value/explained_variance": Metric(share)}


def add_effective_sample_size(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Replace the moments of the importance weights w = trainer / engine with the effective sample size of the engine's
    tokens under the trainer's policy. The size is a fraction of the number of tokens, (Σw)² / (n·Σw²) (Kong 1992;
    https://arxiv.org/abs/1602.03572 compares such estimators)."""
    names = ("mismatch/weight_mean", "mismatch/weight_square_mean")
    if any(name not in metrics for name in names):
        return dict(metrics)
    first, second = (metrics[name].value for name in names)
    rest = {name: metric for name, metric in metrics.items() if name not in names}
    share = min(1.0, first**2 / second) if second else 0.0  # `second` is 0 if all weights underflow
    return rest | {"mismatch/effective_frac": Metric(share, metrics[names[0]].weight)}


def _version_metrics(samples: Sequence[SampleRef], trained: int, max_staleness: int) -> dict[str, float]:
    """Return staleness metrics for the samples, relative to the version `trained` from which the step's updates start.
    The age of a sample is that of its oldest token. If max_staleness is above 0, include the fraction of samples at
    each age."""
    # Exclude rollouts that failed before the first token.
    samples = [sample for sample in samples if sample.num_response_tokens]
    if not samples:
        return {}
    ages = [trained - sample.version_oldest for sample in samples]
    shares = {f"weights/staleness_{age}_share": fmean(a == age for a in ages) for age in range(max_staleness + 1)}
    return {
        "weights/staleness_max": max(ages),
        "weights/mixed_frac": fmean(sample.version_oldest != sample.version_newest for sample in samples),
        **(shares if max_staleness else {}),
    }


def _response_metrics(samples: Sequence[SampleRef]) -> dict[str, float]:
    """Return length metrics; empty if all responses of the step are given."""
    if not samples:
        return {}
    lengths = [sample.num_response_tokens for sample in samples]
    return {
        "response/length_mean": fmean(lengths),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/truncated_frac": fmean(sample.finish_reason == "length" for sample in samples),
    }


def _rollout_metrics(samples: Sequence[SampleRef]) -> dict[str, float]:
    """Return metrics for rollouts in environments; empty without an environment."""
    rollouts = [*{sample.rollout_id: sample.rollout for sample in samples if sample.rollout is not None}.values()]
    if not rollouts:
        return {}
    calls: Counter[str] = Counter()
    for rollout in rollouts:
        calls += Counter(rollout.tool_calls)
    num_calls, num_context = calls.total(), sum(rollout.num_context_tokens for rollout in rollouts)
    num_cached = sum(rollout.num_cached_tokens for rollout in rollouts)
    return {
        "environment/turns_mean": fmean(rollout.num_turns for rollout in rollouts),
        "environment/turns_max": max(rollout.num_turns for rollout in rollouts),
        "environment/samples_per_rollout": fmean(rollout.num_samples for rollout in rollouts),
        **{
            f"environment/stop_{reason}": fmean(rollout.stop_reason == reason for rollout in rollouts)
            for reason in StopReason
        },
        "environment/restarts": sum(rollout.num_restarts for rollout in rollouts),
        "environment/tool_calls": num_calls / len(rollouts),
        "environment/tool_error_frac": 1 - calls["ok"] / num_calls if num_calls else 0.0,
        **{
            f"environment/tool_{status}": count / len(rollouts)
            for status, count in sorted(calls.items())
            if status != "ok"
        },
        "environment/prefix_hit_frac": num_cached / num_context if num_context else 0.0,
    }
