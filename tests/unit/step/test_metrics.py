"""Metrics of a step whose samples contain tokens of several weight versions."""

from dataclasses import replace
from statistics import fmean

import pytest

from megarl.config.load import load
from megarl.core.completion import DraftCounts, VersionRun
from megarl.core.metrics import Metric, merge, values
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.timing import Stopwatch
from megarl.step.metrics import add_effective_sample_size, step_metrics, update_rate
from tests.paths import BASE, QUICKSTART


def remote_sample(*runs: tuple[int, int]) -> SampleRef:
    """Return a sample with the given (version, count) runs of tokens."""
    n = sum(count for _, count in runs)
    versions = tuple(VersionRun(*run) for run in runs)
    sample = Sample("s", Prompt("p", "", (1,)), (2,) * n, (-1.0,) * n, (True,) * n, versions, "stop", "")
    return SampleRef.of(sample, "ref")


@pytest.mark.parametrize(
    ("groups", "staleness", "mixed"),
    [
        ([[remote_sample((6, 3))], [remote_sample((6, 1))]], 0, 0.0),
        (
            [[remote_sample((5, 2)), remote_sample((6, 2))], [remote_sample((5, 4), (6, 1)), remote_sample((6, 1))]],
            1,
            0.25,
        ),
        ([[remote_sample((3, 2), (4, 1), (6, 2)), remote_sample((4, 1), (5, 7))]], 3, 1.0),
    ],
)
def test_staleness_of_versions_is_reported(groups, staleness, mixed):
    metrics = step_metrics(load(QUICKSTART), groups, Stopwatch(), version=7)
    assert (metrics["weights/staleness_max"], metrics["weights/mixed_frac"]) == (staleness, mixed)


def test_step_without_update_or_gradient_has_no_lr():
    assert update_rate({"value/lr": Metric(1e-3), "value/grad_norm": Metric(2.0)}) == 0
    assert update_rate({"policy/skipped_updates": Metric(2.0)}) == 0
    assert update_rate({"policy/lr": Metric(1e-3), "policy/grad_norm": Metric(0.0)}) == 0
    assert update_rate({"policy/lr": Metric(1e-3), "policy/grad_norm": Metric(2.0)}) == 1e-3


def test_effective_sample_size_is_kongs_over_all_tokens() -> None:
    """Two microbatches of five and three tokens, compared with the weights of all eight."""
    weights = [0.2, 1.0, 3.0, 0.7, 1.1, 0.9, 0.05, 2.0]
    parts = [
        {
            "mismatch/weight_mean": Metric(fmean(part), len(part)),
            "mismatch/weight_square_mean": Metric(fmean(w * w for w in part), len(part)),
        }
        for part in (weights[:5], weights[5:])
    ]
    found = add_effective_sample_size(merge(parts))
    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert values(found) == {"mismatch/effective_frac": pytest.approx(expected)}
    assert add_effective_sample_size({"policy/loss": Metric(1.0)}) == {"policy/loss": Metric(1.0)}


def test_draft_metrics_weight_samples_by_their_passes():
    one, two, three = (remote_sample((6, 4)) for _ in range(3))
    groups = [[replace(one, drafts=DraftCounts(4, 10, 2)), replace(two, drafts=DraftCounts(1, 2, 2))], [three]]
    metrics = step_metrics(load(QUICKSTART), groups, Stopwatch(), version=7)
    assert metrics["rollout/draft_accepted_frac"] == pytest.approx(4 / 12)
    assert metrics["rollout/accepted_length_mean"] == pytest.approx(1 + 4 / 5)
    without = step_metrics(load(QUICKSTART), [[one]], Stopwatch(), version=7)
    assert not any("draft" in name or "accepted" in name for name in without)


def test_given_responses_are_not_counted_as_samples():
    distillation = "algorithm.distillation={divergence: jsd, placement: loss, on_policy_share: 0.5}"
    alone = ("algorithm.advantage.estimator=policy_gradient", "rewards.functions=[]")
    teachers = ("data={source: rows.jsonl, response_column: solution}", "teachers.models=[{name: t, path: x}]")
    config = load(BASE, ["model.path=m", *alone, *teachers, distillation])
    sampled = replace(remote_sample((6, 3)), rollout_id="7.0.0")
    given = replace(remote_sample((2, 9)), rollout_id="7.1.given")
    metrics = step_metrics(config, [[sampled], [given]], Stopwatch(), version=7)
    assert metrics["distillation/on_policy_frac"] == 0.5
    assert metrics["response/length_mean"] == metrics["response/length_max"] == 3
    assert metrics["weights/staleness_max"] == 0
    assert "response/length_mean" not in step_metrics(config, [[given]], Stopwatch(), version=7)
