"""The sampled responses that are compared."""

from megarl.step.pairs import best_and_worst
from megarl.step.scoring import ScoredSample


def group(*rewards: float) -> list[ScoredSample]:
    return [ScoredSample(f"{number}", reward) for number, reward in enumerate(rewards)]


def test_the_best_and_the_worst_of_each_group_in_this_order():
    pairs = best_and_worst([group(0.5, 0.0, 1.0, 1.0, 0.0), group(2.0, 3.0)])
    assert [(item.sample, item.reward) for item in pairs] == [("2", 1.0), ("1", 0.0), ("1", 3.0), ("0", 2.0)]


def test_ties_prefer_nothing():
    assert best_and_worst([group(1.0, 1.0), group(0.5)]) == []
