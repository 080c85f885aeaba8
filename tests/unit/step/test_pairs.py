"""Pairs of sampled responses for preference objectives."""

from megarl.core.sample import SampleRef
from megarl.step.updates import best_and_worst


def group(*rewards: float) -> list[SampleRef]:
    return [SampleRef(f"{number}", "p", 1, 1, 1, "stop", 0, 0, outcome=reward) for number, reward in enumerate(rewards)]


def test_pairs_are_the_best_and_worst_of_each_group():
    pairs = best_and_worst([group(0.5, 0.0, 1.0, 1.0, 0.0), group(2.0, 3.0)])
    assert [(item.id, item.reward) for item in pairs] == [("2", 1.0), ("1", 0.0), ("1", 3.0), ("0", 2.0)]


def test_ties_form_no_pair():
    assert best_and_worst([group(1.0, 1.0), group(0.5)]) == []
