"""Rewards by comparison."""

import pytest

from megarl.core.types import Prompt, Sample, VersionRun
from megarl.rewards.judge import verdicts
from megarl.rewards.scorer import Scorer


def sample(prompt: int, text: str) -> Sample:
    asked = Prompt(f"p{prompt}", f"question {prompt}", (5,), answer=str(prompt))
    return Sample(f"{prompt}.{text}", asked, (7,), (-1.0,), (True,), (VersionRun(0, 1),), "stop", text)


def longer(prompt: str, first: str, second: str, answer: str) -> bool | float:
    assert prompt == f"question {answer}"
    return 0.5 if len(first) == len(second) else len(first) > len(second)


def test_a_response_is_worth_the_share_of_the_others_that_it_beats():
    samples = [sample(0, "aa"), sample(1, "b"), sample(0, "a"), sample(0, "aaa"), sample(1, "c"), sample(0, "bb")]
    found = verdicts(longer, samples)
    assert found == {
        "0.aa": pytest.approx(1.5 / 3),
        "0.a": 0.0,
        "0.aaa": 1.0,
        "0.bb": pytest.approx(1.5 / 3),
        "1.b": 0.5,
        "1.c": 0.5,
    }


def test_each_two_are_compared_once():
    asked = []
    verdicts(lambda *words: asked.append(words[1:3]) or True, [sample(0, text) for text in "abc"])
    assert asked == [("a", "b"), ("a", "c"), ("b", "c")]


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda prompt, first, second, answer: {}[first], "raised KeyError: 'a' on samples 0.a and 0.b"),
        (lambda *words: 2, "raised ValueError: it returned 2, not a bool or a probability on samples 0.a and 0.b"),
        (lambda *words: "first", "raised ValueError: it returned 'first', not a bool"),
        (lambda *words: float("nan"), "raised ValueError: it returned nan, not a bool"),
    ],
)
def test_a_comparison_that_fails_is_a_failure_of_both(judge, reason):
    found = verdicts(judge, [sample(0, "a"), sample(0, "b")])
    assert all(verdict.startswith(reason) for verdict in found.values()) and len(found) == 2


def test_a_response_alone_has_no_verdict():
    assert verdicts(longer, [sample(0, "a")]) == {"0.a": "has no other response to compare it with"}


def test_the_verdict_is_a_part_of_the_reward(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("def longer(prompt, first, second, answer):\n    return len(first) > len(second)\n")
    scorer = Scorer([], judge_name=f"{file}:longer")
    samples = [sample(0, "aa"), sample(0, "a")]
    found = scorer.verdicts(samples)
    scores = [scorer.score(item, verdict=found[item.id])[0] for item in samples]
    assert [(score.value, score.parts) for score in scores] == [(1.0, {"judge": 1.0}), (0.0, {"judge": 0.0})]
    failed, _ = scorer.score(samples[0], verdict="raised KeyError: 1")
    assert failed.value is None and failed.failure == "rewards.functions: judge raised KeyError: 1, on sample 0.aa"
    assert Scorer([]).verdicts(samples) == {}


def test_a_judge_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"rewards.judge: .*none.py is not a Python file"):
        Scorer([], judge_name=f"{tmp_path}/none.py:judge")
    (tmp_path / "file.py").write_text("")
    with pytest.raises(ValueError, match=r"has no function 'judge'; define it as judge\(prompt, first, second, answer"):
        Scorer([], judge_name=f"{tmp_path}/file.py:judge")
