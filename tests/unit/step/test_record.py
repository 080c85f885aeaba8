"""The record of a step in the sample ledger."""

from __future__ import annotations

from dataclasses import replace

from megarl.core.episode import RolloutInfo
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.step.queue import Draws
from megarl.step.record import step_record
from megarl.step.state import PendingPrompt


def sample(name: str, rollout: str, tokens: int, oldest: int, newest: int, turns: int | None = None) -> SampleRef:
    info = None if turns is None else RolloutInfo("done", turns, 1, {}, 0, 0)
    return SampleRef(name, "p", 1, tokens, tokens, "stop", oldest, newest, rollout_id=rollout, rollout=info)


def test_record_counts_rollouts_turns_and_versions():
    """The second group has a rollout with two samples, one without tokens, and one that failed."""
    first = [sample(f"5.0.{k}", "", 4, 3, 4) for k in range(2)]
    second = [
        sample("4.1.0", "4.1.0", 7, 2, 3, turns=3),
        sample("4.1.0.1", "4.1.0", 8, 3, 4, turns=3),
        sample("4.1.1", "4.1.1", 0, 0, 0, turns=0),
        sample("4.1.2", "4.1.2", 9, 4, 4, turns=2),
    ]
    third = [replace(sample(f"5.2.{k}", "", 1, 4, 4), prompt_id="q") for k in range(2)]
    scores = [Score(float(k), {}) for k in range(2)]
    scores += [
        Score(1.0, {}),
        Score(1.0, {}),
        Score(0.0, {}),
        Score(None, {}, "x" * 200),
        Score(1.0, {}),
        Score(1.0, {}),
    ]
    items = [PendingPrompt(8, 4, 20), PendingPrompt(3, 2, 11), PendingPrompt(9, 4, 21)]
    draws = Draws([8, 9], items, [(PendingPrompt(6, 4, 12), 3, True), (PendingPrompt(7, 4, 13), 2, False)])
    scored = [
        [replace(each, outcome=1.0 * k) for k, each in enumerate(first)],
        second[:3],
        [replace(each, outcome=1.0) for each in third],
    ]
    assert step_record(draws, [first, second, third], scores, scored, [scored[0], scored[1]]) == {
        "drawn": [8, 9],
        "trained": {
            "draw": [20, 11],
            "row": [8, 3],
            "prompt": ["p", "p"],
            "group": ["5.0", "4.1"],
            "rollouts": [2, 3],
            "samples": [2, 4],
            "turns": [2, 5],
            "tokens": [8, 24],
            "oldest": [3, 2],
            "newest": [4, 4],
            "failed": [0, 1],
        },
        "left_out": {
            "draw": [21],
            "row": [9],
            "prompt": ["q"],
            "group": ["5.2"],
            "rollouts": [2],
            "samples": [2],
            "turns": [2],
            "tokens": [2],
            "oldest": [4],
            "newest": [4],
            "failed": [0],
            "why": ["uninformative"],
        },
        "failed": {"rollout": ["4.1.2"], "why": ["x" * 120]},
        "dropped": {"draw": [12, 13], "samples": [3, 2], "why": ["aborted", "stale"]},
    }


def test_groups_without_scores_or_beyond_the_step_are_left_out():
    groups = [[sample(f"1.{i}.{k}", "", 1, 0, 0) for k in range(2)] for i in range(2)]
    scores = [Score(None, {}, "a"), Score(None, {}), Score(0.0, {}), Score(1.0, {})]
    scored = [[], [replace(each, outcome=1.0 * k) for k, each in enumerate(groups[1])]]
    record = step_record(Draws([], [PendingPrompt(i, 0, i) for i in range(2)]), groups, scores, scored, [[]])
    assert record["trained"] == {}
    assert record["left_out"]["why"] == ["no score", "surplus"]
    assert record["failed"] == {"rollout": ["1.0.0", "1.0.1"], "why": ["a", "no reward"]}
