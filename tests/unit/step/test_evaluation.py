"""The requests of an evaluation to the engines, and the description of its result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.core.completion import DraftCounts
from megarl.core.episode import RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.data.prompts import PromptSet
from megarl.step import requests as training
from megarl.step.evaluation import requests, result, versions_of
from tests.unit.config.rules.recipes import recipe

PROMPTS = PromptSet(tuple(Prompt(f"p{i}", "?", [i]) for i in range(2)), "hash")
SETS = (
    "evaluation.sets=[{name: a}, {name: b, samples_per_prompt: 3, temperature: 0.7, top_p: 0.9, top_k: 5, "
    "max_new_tokens: 32}]"
)


def test_requests_have_the_settings_of_their_set() -> None:
    config = recipe(SETS, "rollout.temperature=1.3", "rollout.top_k=50")
    a, b = (requests(config, given, PROMPTS) for given in config.evaluation.sets)
    assert [len(group) for group in (*a, *b)] == [1, 1, 3, 3]
    [[greedy], _], [[sampled, _, _], _] = a, b
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.max_new_tokens) == (0.0, 1.0, 0, 16)
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.max_new_tokens) == (0.7, 0.9, 5, 32)
    assert greedy.is_greedy and not sampled.is_greedy


def test_requests_are_fixed_and_differ_from_training() -> None:
    config = recipe(SETS)
    [_, given] = config.evaluation.sets
    asked = [request for group in requests(config, given, PROMPTS) for request in group]
    assert asked == [request for group in requests(config, given, PROMPTS) for request in group]
    trained = [request for group in training.requests(config, 1, PROMPTS.prompts) for request in group]
    assert trained == [r for group in training.requests(recipe(), 1, PROMPTS.prompts) for r in group]
    assert {request.seed for request in asked}.isdisjoint(request.seed for request in trained)
    tasks = [{request.group_seed for request in group} for group in requests(config, given, PROMPTS)]
    assert [len(seeds) for seeds in tasks] == [1, 1] and len(set.union(*tasks)) == 2, (
        "the rollouts of a prompt share one seed"
    )
    assert set.union(*tasks).isdisjoint({request.group_seed for request in trained} | {r.seed for r in asked})
    assert {request.purpose for request in asked}.isdisjoint({request.purpose for request in trained})


def info(name: str, length: int, reason: str) -> SampleRef:
    return SampleRef(name, "p", 4, length, length, reason, 3, 3)


def test_result_reports_failures_separately() -> None:
    [_, given] = recipe(SETS).evaluation.sets
    groups = [
        [info("0.0", 2, "stop"), info("0.1", 4, "length"), info("0.2", 6, "stop")],
        [info("1.0", 8, "length"), info("1.1", 2, "stop"), info("1.2", 2, "stop")],
    ]
    scores = [Score(value, {}, None if value is not None else "f hung") for value in (1.0, 0.0, None, 1.0, 1.0, 1.0)]
    found = result(given, groups, scores)
    metrics = found.metrics()
    assert metrics["evaluation/b/failed_frac"] == pytest.approx(1 / 6)
    assert metrics["evaluation/b/avg@3"] == 0.75, "a failed sample is excluded, not counted as wrong"
    assert metrics["evaluation/b/pass@3"] == 1.0, "only one prompt has three scores"
    assert metrics["evaluation/b/truncated_frac"] == pytest.approx(1 / 3)
    assert metrics["evaluation/b/length_mean"] == 4
    assert metrics["evaluation/b/avg@3_low"] < 0.75 < metrics["evaluation/b/avg@3_high"]
    assert found.describe().startswith("b (2 prompts × 3): avg@3 0.750 [")
    assert found.describe().endswith(", 16.7% failed (first failure: f hung)")


def test_set_without_scores_has_no_value() -> None:
    [given, _] = recipe(SETS).evaluation.sets
    found = result(given, [[info("0.0", 2, "stop")]], [Score(None, {}, "f hung")])
    assert found.metrics() == {
        "evaluation/a/failed_frac": 1.0,
        "evaluation/a/truncated_frac": 0.0,
        "evaluation/a/length_mean": 2.0,
    }
    assert found.describe() == "a (1 prompt × 1): 100.0% failed (first failure: f hung)"


def played(name: str, trained: int, stop: str = "done", turns: int = 2, samples: int = 1) -> list[SampleRef]:
    """Return references to a rollout's samples, each with `trained` policy tokens out of 50."""
    numbers = RolloutInfo(stop, turns, samples, {}, 0, 0)
    names = [name, *(f"{name}/{k}" for k in range(1, samples))]
    return [SampleRef(n, "p", 4, 50, trained, "stop", 3, 3, rollout_id=name, rollout=numbers) for n in names]


def test_multi_sample_rollouts_count_once() -> None:
    [_, given] = recipe(SETS).evaluation.sets
    groups = [
        [*played("0.0", 3, samples=3), *played("0.1", 5), *played("0.2", 7, stop="max_turns", turns=8)],
        [*played("1.0", 2), *played("1.1", 40, stop="failed", turns=99), *played("1.2", 4, stop="max_tokens", turns=2)],
    ]
    values = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, None, 1.0]
    scores = [Score(value, {}, None if value is not None else "environment: step raised") for value in values]
    metrics = {name.rpartition("/")[2]: value for name, value in result(given, groups, scores).metrics().items()}
    assert metrics["avg@3"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["pass@1"] == pytest.approx((1 / 3 + 1) / 2) and metrics["pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert metrics["pass^2"] == pytest.approx((0 + 1) / 2) and metrics["pass^3"] == 0
    assert metrics["failed_frac"] == pytest.approx(1 / 6)
    assert metrics["truncated_frac"] == pytest.approx(2 / 5)
    assert metrics["length_mean"] == pytest.approx((3 * 3 + 5 + 7 + 2 + 4) / 5), (
        "only policy tokens count, without the context"
    )
    assert metrics["turns_mean"] == pytest.approx((2 + 2 + 8 + 2 + 2) / 5)


def test_set_with_only_failures_reports_only_these() -> None:
    [given, _] = recipe(SETS).evaluation.sets
    found = result(given, [played("0.0", 0, stop="failed")], [Score(None, {}, "environment: no server")])
    assert found.metrics() == {"evaluation/a/failed_frac": 1.0}
    assert found.describe() == "a (1 prompt × 1): 100.0% failed (first failure: environment: no server)"


def test_rollout_without_tokens_has_no_version() -> None:
    empty = SampleRef("0.0", "p", 0, 0, 0, "stop", 0, 0)
    assert versions_of([[empty, *played("0.1", 3)]]) == {3} and versions_of([[empty]]) == set()


def test_draft_tokens_of_a_set_are_counted() -> None:
    [given, _] = recipe(SETS).evaluation.sets
    samples = [replace(info("0.0", 2, "stop"), drafts=DraftCounts(2, 6, 3))]
    metrics = result(given, [samples], [Score(1.0, {}, None)]).metrics()
    assert metrics["evaluation/a/draft_accepted_frac"] == 0.5
    assert metrics["evaluation/a/accepted_length_mean"] == 2.5
