"""The record of a step in the run's sample ledger: which rows it drew, trained on, left out and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.step.queue import Draws
from megarl.step.rollout_rewards import rollouts_of
from megarl.step.scoring import is_informative
from megarl.step.state import PendingPrompt

MAX_REASON = 120
"""Maximum length, in characters, of the reason why a rollout has no score."""

Record = Mapping[str, Any]
"""JSON values of a step's record. Tables are objects with one list per column."""


def step_record(
    draws: Draws,
    sampled: Sequence[Sequence[SampleRef]],
    scores: Sequence[Score],
    scored: Sequence[Sequence[SampleRef]],
    chosen: Iterable[Sequence[SampleRef]],
) -> Record:
    """Return the record of a step.

    Args:
        draws: the rows of the groups in `sampled` and of all other groups that the step drew, took or dropped.
        sampled: all samples, by group.
        scores: their scores, in order.
        scored: the samples with a score, by group.
        chosen: the groups that the step trains on.
    """
    names = {group[0].group for group in chosen if group}
    remaining = iter(scores)
    trained, left_out, failed = [], [], []
    for item, group, scored_group in zip(draws.taken, sampled, scored, strict=True):
        reasons = _failures(group, [next(remaining) for _ in group])
        row = _group(item, group) | {"failed": len(reasons)}
        failed += [{"rollout": name, "why": reason[:MAX_REASON]} for name, reason in reasons.items()]
        if group[0].group in names:
            trained.append(row)
        else:
            left_out.append(row | {"why": _reason(scored_group)})
    dropped = [
        {"draw": item.draw, "samples": num_samples, "why": "aborted" if is_aborted else "stale"}
        for item, num_samples, is_aborted in draws.dropped
    ]
    tables = {"trained": trained, "left_out": left_out, "failed": failed, "dropped": dropped}
    return {"drawn": draws.rows, **{name: _columns(rows) for name, rows in tables.items()}}


def offline_record(items: Sequence[PendingPrompt], groups: Sequence[Sequence[SampleRef]]) -> Record:
    """Return the record of a step that trains on rows of offline data."""
    rows = [_group(item, group, is_sampled=False) | {"failed": 0} for item, group in zip(items, groups, strict=True)]
    drawn = [item.row for item in items]
    return {"drawn": drawn, "trained": _columns(rows), "left_out": {}, "failed": {}, "dropped": {}}


def _group(item: PendingPrompt, group: Sequence[SampleRef], is_sampled: bool = True) -> dict[str, Any]:
    """Return the row of a group. `turns` are summed over rollouts. `oldest` and `newest` are the weight versions that
    sampled the group's tokens."""
    rollouts = rollouts_of(group) if is_sampled else []
    sampled = [sample for sample in group if is_sampled and sample.num_response_tokens]
    return {
        "draw": item.draw,
        "row": item.row,
        "prompt": group[0].prompt_id,
        "group": group[0].rollout_id.rpartition(".")[0] if is_sampled else str(item.draw),
        "rollouts": len(rollouts),
        "samples": len(group),
        "turns": sum(1 if first.rollout is None else first.rollout.num_turns for first, *_ in rollouts),
        "tokens": sum(sample.num_trained_tokens for sample in group),
        "oldest": min((sample.version_oldest for sample in sampled), default=None),
        "newest": max((sample.version_newest for sample in sampled), default=None),
    }


def _failures(group: Sequence[SampleRef], scores: Sequence[Score]) -> dict[str, str]:
    """Return the reasons why rollouts have no score, by rollout id."""
    return {
        sample.rollout_id: score.failure or "no reward"
        for sample, score in zip(group, scores, strict=True)
        if score.value is None
    }


def _reason(scored: Sequence[SampleRef]) -> str:
    """Return the reason why a step does not train on a group."""
    if not scored:
        return "no score"
    return "surplus" if is_informative(scored) else "uninformative"


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
