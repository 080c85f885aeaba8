"""`megarl audit`: read a run's sample ledger, and compare it with the run's other files."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.text import printable
from megarl.run.audit.chain import Broken, Chain
from megarl.run.audit.files import (
    BUDGET_BYTES,
    Listing,
    check_checkpoints,
    check_end,
    check_evaluations,
    check_metrics,
    check_rollouts,
    check_settings,
    checked,
    chosen_files,
    reasons,
)
from megarl.run.audit.history import MAX_REASONS, SCOPES, History
from megarl.run.folder import RunFolder


def audit(path: Path, reads_all: bool = False) -> tuple[bool, list[str]]:
    """Return whether a run's files agree with its ledger, and lines with the proof or the first contradiction. Raise
    UserError if the folder has no ledger. reads_all: whether to compare all rollout files, instead of files up to
    BUDGET_BYTES."""
    folder = RunFolder(path)
    if not folder.samples.exists():
        raise UserError(
            f"{path}: not a run folder with a ledger ({folder.samples.name} is missing). Fix: pass the folder of a "
            "run, such as runs/latest"
        )
    try:
        return True, [printable(line) for line in _proof(folder, math.inf if reads_all else BUDGET_BYTES)]
    except Broken as broken:
        return False, [printable(str(broken))]


def _proof(folder: RunFolder, budget: float) -> list[str]:
    listing = Listing.of(folder)
    chosen = chosen_files(listing.rollouts, budget)
    chain, history = Chain(folder.samples), History(chosen, listing.checkpoints)
    for content in chain.lines():
        history.read(chain.number, content, chain.place())
    if not chain.number:
        raise Broken(str(folder.samples), "a line `run`, which begins a ledger", "no complete line")
    check_end(folder, history, listing.finished_after)
    checked(folder.config, lambda: check_settings(folder, history))
    compared = [
        checked(folder.metrics, lambda: check_metrics(folder, history, listing.metrics_bytes)),
        checked(folder.path / "rollouts", lambda: check_rollouts(chosen, history, len(listing.rollouts))),
        checked(folder.path / "evaluations", lambda: check_evaluations(folder, history, budget)),
    ]
    checkpoints = checked(folder.checkpoints, lambda: check_checkpoints(listing.checkpoints, history))
    torn = " and a partial one" if chain.is_torn else ""
    lines = [
        f"{folder.path}: proven. No drawn row was lost or used twice, and the hash chain is unbroken",
        *_history_lines(history),
        f"checkpoints  {checkpoints}",
        f"files        {', '.join(compared)}",
        f"ledger       {chain.number:,} lines{torn}. Hash of the last line: {chain.last}",
        *(f"not proven   {line}" for line in _gaps(history)),
    ]
    return lines


def _history_lines(history: History) -> list[str]:
    totals, num_steps = history.totals, len(history.steps)
    data = history.settings["data"]
    order = "in the order of the data's epochs" if history.knows_order else "in any order"
    groups = totals.trained + sum(totals.left_out.values())
    state = "finished" if history.has_ended else "not finished"
    return [
        f"steps        {num_steps:,} ({history.base + 1} to {history.head}, {state}). "
        f"Restarts: {history.num_starts:,}, undone steps: {history.undone:,}",
        f"rows         {history.num_draws - history.first_draw:,} draws from {data['rows']:,} rows, {order}; "
        f"{totals.trained:,} trained on, each in one step; {_listed('left out', totals.left_out)}; "
        f"{len(history.open):,} pending",
        f"turns        {groups:,} groups with {totals.rollouts:,} rollouts, {totals.turns:,} turns and "
        f"{totals.tokens:,} trained tokens",
        f"staleness    at most {totals.oldest} of {history.settings['max_staleness'] or 0} versions "
        "(rollout.max_staleness)",
        *_weight_lines(history),
        f"dropped      {_listed('groups, which were sampled again', totals.dropped)}",
        f"failed       {_listed('rollouts', totals.failed)}",
        f"evaluations  {len(history.evaluations):,} "
        f"({sum(each['failed'] for each in history.evaluations.values()):,} failed rollouts)",
    ]


def _listed(noun: str, counts: dict[str, int]) -> str:
    listed = ", ".join(reasons(counts, MAX_REASONS))
    return f"{sum(counts.values()):,} {noun}" + (f" ({listed})" if listed else "")


def _weight_lines(history: History) -> list[str]:
    """Describe the links between the trainer's weights after each update and the engines' weights after the refit."""
    steps = [step.weights for step in history.steps if step.weights]
    if not steps:
        return []
    counts = {
        scope: sum(scope in weights and weights[scope]["engines"] is not None for weights in steps) for scope in SCOPES
    }
    return [
        f"weights      engines confirmed the trainer's checksums after {history.num_confirmed:,} of {len(steps):,} "
        f"updates ({counts['all']:,} over all weights, the others over a sample); {history.num_same_weights:,} of "
        f"{history.num_refits:,} restarts began with the checksums of their step"
    ]


def _gaps(history: History) -> list[str]:
    """Return the links that no checksum verifies."""
    lines = []
    steps = [step for step in history.steps if step.weights]
    if steps:
        lines.append(
            "between a refit and the next update, the weights stay in the trainers' memory and are not hashed again"
        )
        if missing := len(steps) - history.num_confirmed:
            lines.append(f"{missing:,} refits were not verified by the engines (rollout.verify_refit)")
        if history.totals.unconfirmed:
            lines.append(f"{history.totals.unconfirmed:,} groups have tokens from versions without verified weights")
        if missing := history.num_refits - history.num_same_weights:
            lines.append(f"{missing:,} restarts could not be compared with the weights of their step")
    if not history.knows_order:
        lines.append("the order of the draws, because the data is drawn by weight or has too many rows")
    if history.base:
        lines.append(f"steps 1 to {history.base}, recorded by another run or before megarl had a ledger")
    return lines
