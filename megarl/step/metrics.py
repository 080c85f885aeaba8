"""Metrics of a step as a whole, beside those of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megarl.cluster.groups.engines import RemoteSample
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.timing import Stopwatch
from megarl.core.types import SampleInfo


def step_metrics(
    config: Config, groups: Sequence[Sequence[RemoteSample]], watch: Stopwatch, version: int
) -> dict[str, float]:
    """Returns metrics of the step's samples, phases and weights. groups: all samples, by prompt; the last of a group
    may be a greedy response, which the metrics of lengths leave out because it is not trained on."""
    infos = [sample.info for group in groups for sample in group]
    sampled = [sample.info for group in groups for sample in group[: config.batch.samples_per_prompt]]
    times = watch.metrics()
    return {
        **_response_metrics(sampled),
        **times,
        "throughput/tokens_per_second": sum(info.num_tokens for info in infos) / times["time/step"],
        "weights/version": version,
        **_version_metrics(infos, version - 1),
    }


def update_rate(metrics: Mapping[str, Metric]) -> float:
    """Returns the mean learning rate of a step's updates of the actor, 0 where there were none, where all were skipped,
    or where no gradient was left. metrics: those of the training."""
    has_learned = "policy/grad_norm" in metrics and metrics["policy/grad_norm"].value > 0
    return metrics["policy/lr"].value if has_learned else 0.0


def _version_metrics(infos: Sequence[SampleInfo], trained: int) -> dict[str, float]:
    """Returns metrics of the samples' weight versions, which are 0 where the version `trained`, from which the step's
    updates start, sampled all tokens."""
    return {
        "weights/staleness_max": trained - min(info.version_oldest for info in infos),
        "weights/mixed_share": fmean(info.version_oldest != info.version_newest for info in infos),
    }


def _response_metrics(infos: Sequence[SampleInfo]) -> dict[str, float]:
    lengths = [info.num_response_tokens for info in infos]
    return {
        "response/length_mean": fmean(lengths),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/truncated_share": fmean(info.finish_reason == "length" for info in infos),
    }
