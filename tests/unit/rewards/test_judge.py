"""Rewards from pairwise comparison."""

from collections.abc import Callable, Sequence

import pytest

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.judge import Order, Verdict, comparisons, verdicts
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer
from megarl.rewards.worker import call


def sample(prompt: int, text: str) -> Sample:
    question = Prompt(f"p{prompt}", f"question {prompt}", (5,), answer=str(prompt))
    return Sample(f"{prompt}.{text}", question, (7,), (-1.0,), (True,), (VersionRun(0, 1),), "stop", text)


def longer(prompt: str, first: str, second: str, answer: str) -> bool | float:
    assert prompt == f"question {answer}"
    return 0.5 if len(first) == len(second) else len(first) > len(second)


def judged(judge: Callable, samples: Sequence[Sample], order: Order = "both") -> dict[str, Verdict]:
    pairs = comparisons(samples, order, seed=0)
    return verdicts(samples, [(item, Result(**call(judge, item.arguments))) for item in pairs])


@pytest.mark.parametrize("order", ["both", "seeded"])
def test_verdict_is_the_share_of_beaten_responses(order):
    samples = [sample(0, "aa"), sample(1, "b"), sample(0, "a"), sample(0, "aaa"), sample(1, "c"), sample(0, "bb")]
    assert judged(longer, samples, order) == {
        "0.aa": pytest.approx(1.5 / 3),
        "0.a": 0.0,
        "0.aaa": 1.0,
        "0.bb": pytest.approx(1.5 / 3),
        "1.b": 0.5,
        "1.c": 0.5,
    }


def test_every_pair_is_compared_in_both_orders():
    samples = [sample(0, text) for text in "abc"] + [sample(1, "d")]
    pairs = [(item.first.text, item.second.text) for item in comparisons(samples, "both", seed=0)]
    assert pairs == [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")]


def test_position_bias_cancels_in_both_orders():
    samples = [sample(0, text) for text in "abc"]
    assert set(judged(lambda *words: True, samples).values()) == {0.5}


def test_random_orders_depend_on_the_seed_and_are_balanced():
    samples = [sample(0, str(i)) for i in range(40)]
    pairs = comparisons(samples, "seeded", seed=3)
    assert pairs == comparisons(samples, "seeded", seed=3) != comparisons(samples, "seeded", seed=4)
    distinct = {frozenset((item.first.id, item.second.id)) for item in pairs}
    assert len(distinct) == len(pairs) == 40 * 39 // 2
    in_order = sum(int(item.first.text) < int(item.second.text) for item in pairs)
    assert abs(in_order / len(pairs) - 0.5) < 0.08  # more than four standard deviations


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda prompt, first, second, answer: {"b": 1}[first], "raised KeyError: 'a' on samples 0.a and 0.b"),
        (lambda *words: 2, "returned 2.0 instead of a bool or a probability on samples 0."),
        (lambda *words: "first", "returned str instead of a bool"),
        (lambda *words: float("nan"), "returned nan instead of a bool"),
    ],
)
def test_failed_comparison_fails_both_samples(judge, reason):
    by_sample = judged(judge, [sample(0, "a"), sample(0, "b")])
    assert all(verdict.startswith(reason) for verdict in by_sample.values()) and len(by_sample) == 2


def test_single_response_has_no_verdict():
    assert judged(longer, [sample(0, "a")]) == {"0.a": "has no second response to compare with"}


def test_verdict_is_a_part_of_the_reward():
    samples = [sample(0, "aa"), sample(0, "a")]
    by_sample = judged(longer, samples)
    scores = [Scorer([]).score(item, {}, verdict=by_sample[item.id])[0] for item in samples]
    assert [(score.value, score.parts) for score in scores] == [(1.0, {"judge": 1.0}), (0.0, {"judge": 0.0})]
    failed, _ = Scorer([]).score(samples[0], {}, verdict="raised KeyError: 1")
    assert failed.value is None and failed.failure == "rewards.functions: judge raised KeyError: 1 (sample 0.aa)"


def test_groups_of_one_prompt_are_compared_separately():
    prompt = Prompt("p", "question 0", (5,), answer="0")
    run = (VersionRun(0, 1),)
    texts = {"1.0.0": "a", "1.0.1": "bb", "1.1.0": "ccc", "1.1.1": "dddd"}
    samples = [Sample(name, prompt, (7,), (-1.0,), (True,), run, "stop", text) for name, text in texts.items()]
    assert judged(longer, samples) == {"1.0.0": 0.0, "1.0.1": 1.0, "1.1.0": 0.0, "1.1.1": 1.0}
