"""Reads a run folder and renders the report as HTML: notes, summary, charts, rollout viewer and configuration."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import yaml

from megarl.config import document
from megarl.config.continuation import Change
from megarl.core.errors import UserError
from megarl.core.files import parse_json, read_text
from megarl.core.text import counted
from megarl.report.charts import Chart, charts_of, data_json, other_charts, resource, script_json, tokens_per_second
from megarl.report.evaluations import PREFIX, SetSamples, evaluation_charts, read_evaluations, render_samples
from megarl.report.history import History, HistoryReader
from megarl.report.time_section import render_time
from megarl.report.viewer import MAX_CHARACTERS, FileCache, Rollouts, page_data, read_rollouts
from megarl.run.folder import RunFolder, changes_in, warnings_in
from megarl.run.loggers import duration
from megarl.run.time_ledger import TimeLedger, read_ledger

GOODPUT = "goodput/"
"""Prefix of the metrics in the section on the run's time."""

LISTED_STEPS = 5  # maximum number of steps or line numbers in a note


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a report. `target_steps` is None if the run has no resolved config."""

    name: str
    subtitle: str
    target_steps: int | None
    config_text: str
    manifest_text: str
    history: History
    rollouts: Rollouts
    evaluations: list[SetSamples] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Keys that changed during the run; see `changes_in`."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """Health warnings; see `warnings_in`."""
    ledger: TimeLedger = field(default_factory=TimeLedger)


def read_contents(folder: Path) -> Contents:
    """Read the contents of a report from the run folder `folder`. The run may be unfinished or may have crashed. Raise
    a UserError if `folder` is not a run folder."""
    return ContentsReader(folder).read()


class ContentsReader:
    """Reads the contents of a report repeatedly. Each `read` parses only the changes since the previous `read`."""

    def __init__(self, folder: Path):
        self._folder = Path(folder)
        self._history, self._samples = HistoryReader(RunFolder(self._folder).metrics), FileCache()

    def read(self) -> Contents:
        contents = _read(self._folder, self._history, self._samples)
        self._samples.drop_unused()
        return contents


def _read(folder: Path, history: HistoryReader, samples: FileCache) -> Contents:
    run_folder = RunFolder(folder)
    if not (os.path.lexists(run_folder.metrics) or os.path.lexists(run_folder.manifest)):
        raise UserError(f"{folder}: not a run folder (no metrics.jsonl or manifest.json). Fix: pass a run folder")
    config_text, manifest_text = _text_of(run_folder.config), _text_of(run_folder.manifest)
    config, manifest = _config_of(run_folder.config, config_text), _manifest_of(run_folder.manifest, manifest_text)
    return Contents(
        name=str(manifest.get("name", run_folder.path.resolve().name)),
        subtitle=" · ".join(str(manifest[key]) for key in ("model", "started") if manifest.get(key)),
        target_steps=_target_steps(config),
        config_text=config_text,
        manifest_text=manifest_text,
        history=history.read(),
        rollouts=read_rollouts(run_folder.rollout_files(), samples),
        evaluations=read_evaluations(run_folder.evaluation_files(), samples),
        changes=changes_in(manifest),
        warnings=warnings_in(manifest),
        ledger=read_ledger(folder),
    )


def _text_of(path: Path) -> str:
    return read_text(path) if os.path.lexists(path) else ""


def _config_of(path: Path, text: str) -> dict[str, Any]:
    try:
        config = document.read(text) or {}
        if not isinstance(config, dict) or not isinstance(config.get("run", {}), dict):
            raise ValueError("not a mapping")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a config: {error}. Fix: restore or remove the file") from None
    return config


def _target_steps(config: dict[str, Any]) -> int | None:
    steps = config.get("run", {}).get("steps")
    return steps if isinstance(steps, int) else None


def _manifest_of(path: Path, text: str) -> dict[str, Any]:
    try:
        manifest = parse_json(text or "{}")
        if not isinstance(manifest, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise UserError(f"{path}: not a run's manifest: {error}. Fix: restore or remove the file") from None
    return manifest


CHART_SCRIPTS = ("dom.js", "uplot/uPlot.iife.min.js", "charts.js")
SCRIPTS = (*CHART_SCRIPTS, "tokens.js", "page.js")
STYLES = ("uplot/uPlot.min.css", "page.css")


def render(run: Contents, hashes: Mapping[str, str] | None = None) -> str:
    """Return the report page as HTML. The page loads no external resources, and its content security policy allows only
    its own scripts.

    Args:
        hashes: hashes of a live page's elements and steps, which the page sends when it polls the server. None for a
            static page.
    """
    is_live = hashes is not None
    return Template(resource("page.html")).substitute(
        name=escape(run.name),
        subtitle=escape(run.subtitle),
        hashes=f' data-hashes="{escape(json.dumps(hashes))}"' if is_live else "",
        connect="connect-src 'self'; " if is_live else "",
        live=f'<p class="note" id="live">{state_of(run)}</p>\n' if is_live else "",
        **{name.replace("-", "_"): html for name, html in render_sections(run).items()},
        rollouts=script_json(page_data(run.rollouts.steps)),
        config=escape(run.config_text),
        manifest=escape(run.manifest_text),
        **chart_parts(page_charts(run.history), {run.name: run.history}, (*SCRIPTS, "live.js") if is_live else SCRIPTS),
    )


def chart_parts(charts: Sequence[Chart], runs: Mapping[str, History], scripts: Sequence[str]) -> dict[str, str]:
    """Return the parts of a page with charts: controls, data, styles, and the scripts with their hash."""
    script = "\n".join(map(resource, scripts))
    return {
        "style": "\n".join(map(resource, STYLES)),
        "chart_controls": resource("chart_controls.html"),
        "chart_data": data_json(charts, runs),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def page_charts(history: History) -> list[Chart]:
    """Return the charts of a report on one run."""
    return [*charts_of(history), *evaluation_charts(history), *other_charts(history, (PREFIX, GOODPUT))]


def state_of(run: Contents) -> str:
    """Return "finished" if the run has reached its last step, else "live"."""
    return "finished" if run.target_steps and _last_step(run.history) >= run.target_steps else "live"


def render_sections(run: Contents) -> dict[str, str]:
    """Return the HTML of the elements that change during a run, keyed by id."""
    return {
        "notes": "".join(f"<li>{escape(note)}</li>" for note in notes(run)),
        "summary": "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in summary(run)),
        "time": render_time(run.ledger),
        "rollout-note": escape(rollout_note(run.rollouts)),
        "evaluation-samples": render_samples(run.evaluations),
    }


def summary(run: Contents) -> list[tuple[str, str]]:
    """Return the rows of the summary table as (label, value) pairs. Missing values are shown as "–"."""
    history = run.history
    reward = history.finite("reward/mean")
    times = history.finite("time/step")
    memory = history.finite("memory/peak_pss_gb")
    memory = memory if len(memory) else history.finite("memory/peak_rss_gb")
    mismatch = history.finite("mismatch/logprob_abs_max")
    steps, rate = str(_last_step(history)), tokens_per_second(history)
    return [
        ("Reward, first step → mean of last 3", f"{_mean(reward[:1], '.3f')} → {_mean(reward[-3:], '.3f')}"),
        ("Steps", f"{steps} of {run.target_steps}" if run.target_steps else steps),
        ("Time in steps", duration(times.sum()) if len(times) else "–"),
        ("Tokens per second", "–" if rate is None else f"{rate:,.0f}"),
        ("Peak memory", f"{memory.max():.2f} GB" if len(memory) else "–"),
        ("Largest mismatch", f"{mismatch.max():.1e}" if len(mismatch) else "–"),
    ]


def notes(run: Contents) -> list[str]:
    """Return notes about incomplete or unusual data. The page shows them above the charts."""
    history = run.history
    texts = [] if len(history.steps) else ["No step has finished yet."]
    if run.target_steps and _last_step(history) < run.target_steps:
        texts.append(f"The run has reached step {_last_step(history)} of {run.target_steps}.")
    texts += [f"Step {warning['step']}: {warning['name']}: {warning['message']}." for warning in run.warnings]
    texts += [
        f"{Change(change['key'], change['from'], change['to']).describe()} after step {change['after_step']}."
        for change in run.changes
    ]
    if history.unreadable:
        texts.append(
            f"metrics.jsonl: skipped {_listed('line', history.unreadable)}, which could not be parsed"
            " (a killed run may leave a partial last line)."
        )
    texts += [
        f"{metric} was NaN or infinite at {_listed('step', steps)}." for metric, steps in history.nonfinite.items()
    ]
    texts += [
        f"{metric}: {count:.0f} skipped because of a NaN or infinite gradient."
        for metric in history.columns
        if metric.endswith("/skipped_updates") and (count := max(history.finite(metric), default=0))
    ]
    broken = [step.step for step in run.rollouts.steps if step.unreadable]
    if broken:
        texts.append(f"Some lines in the rollouts of {_listed('step', broken)} could not be parsed.")
    return texts


def rollout_note(rollouts: Rollouts) -> str:
    """Describe which samples the rollout viewer shows."""
    if not rollouts.steps:
        return "The run has no rollout files."
    kept = sum(len(step.samples) for step in rollouts.steps)
    num_samples = sum(step.num_samples for step in rollouts.steps)
    parts = []
    if len(rollouts.steps) < rollouts.num_steps:
        parts.append(f"{len(rollouts.steps)} of {rollouts.num_steps} steps, evenly spaced")
    if kept < num_samples:
        parts.append(f"{kept} of the {num_samples} samples in these steps, evenly spaced by reward")
    num_omitted = rollouts.num_omitted_images
    verb = "is" if num_omitted == 1 else "are"
    omission = f" {num_omitted} of their images {verb} missing or omitted to limit the page's size."
    images = omission if num_omitted else ""
    if not parts:
        shown = f"This section shows all {counted(kept, 'sample')} of the run."
        return f"{shown} Texts are limited to {MAX_CHARACTERS} characters.{images}"
    selection = ", and ".join(parts)
    return (
        f"This section shows {selection}. Texts are limited to {MAX_CHARACTERS} characters. All samples are in "
        f"rollouts/.{images}"
    )


def _last_step(history: History) -> int:
    return int(history.steps[-1]) if len(history.steps) else 0


def _mean(values: np.ndarray, specification: str) -> str:
    return format(values.mean(), specification) if len(values) else "–"


def _listed(noun: str, numbers: list[int]) -> str:
    """Format numbers as "step 7", "steps 7, 9, 12" or "steps 1, 2, 3, 4, 5 and 8 more"."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:LISTED_STEPS])
    more = len(numbers) - LISTED_STEPS
    return f"{noun}s {shown}" + (f" and {more} more" if more > 0 else "")
