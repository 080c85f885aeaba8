"""Renders a page that compares runs: overlaid curves, config differences, final results and evaluation images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from megarl.config import document
from megarl.config.document import leaves, one_line
from megarl.core.errors import UserError
from megarl.core.files import replace_text
from megarl.report.charts import CHARTS, NUM_COLORS, REWARD, Chart, Line, charted_metrics, resource
from megarl.report.common_images import NOISE_KEYS, CommonImages, read_common_images, render_common_images
from megarl.report.history import History
from megarl.report.page import CHART_SCRIPTS, Contents, chart_parts, read_contents, summary
from megarl.run.folder import RunFolder

ABSENT = "–"
NAMES = ("run.name", "run.folder", "run.replace", "resume")
"""Config keys to exclude from the comparison because they differ between any two runs."""


def write(folders: Sequence[Path]) -> Path:
    """Write a comparison of runs to the first run's folder and return its path. Raise a UserError if one of the folders
    is not a run folder, or there are more runs than chart colors."""
    if len(folders) > NUM_COLORS:
        raise UserError(
            f"{len(folders)} runs: a chart can show at most {NUM_COLORS}. Fix: pass at most {NUM_COLORS} runs"
        )
    runs = [read_contents(folder) for folder in folders]
    others = "_".join(Path(folder).resolve().name for folder in folders[1:])
    out = Path(folders[0]) / f"against_{others}.html"
    images = read_common_images([RunFolder(Path(folder)).evaluation_files() for folder in folders])
    replace_text(out, render(runs, [str(folder) for folder in folders], images))
    return out


def render(runs: Sequence[Contents], folders: Sequence[str], images: Sequence[CommonImages]) -> str:
    """Return the comparison page as HTML. The page loads no external resources."""
    names, figures = labels([run.name for run in runs], folders), [dict(summary(run)) for run in runs]
    configs = [dict(leaves(document.read(run.config_text) or {})) for run in runs]
    differences = list(_differences(configs))
    histories = dict(zip(names, (run.history for run in runs), strict=True))
    count = {0: "No keys differ.", 1: "One key differs."}.get(len(differences), f"{len(differences)} keys differ.")
    return Template(resource("comparison.html")).substitute(
        title=escape(" and ".join(names)),
        subtitle=escape(" · ".join(folders)),
        figures=_table(names, ((label, [column[label] for column in figures]) for label in figures[0])),
        config_note=count,
        differences=_table(names, differences) if differences else "",
        images=render_common_images(images, names, _differing(NOISE_KEYS, configs)),
        **chart_parts([chart for chart in _charts(histories) if chart.lines], histories, CHART_SCRIPTS),
    )


def labels(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return unique labels for the runs: the run names if they are unique, else the folder names if those are unique,
    else the folder paths."""
    candidates = (names, [Path(folder).resolve().name for folder in folders], folders)
    return list(next((candidate for candidate in candidates if len(set(candidate)) == len(candidate)), folders))


def _differences(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [one_line(config[key]) if key in config else ABSENT for config in configs]
        if key not in NAMES and len(set(values)) > 1:
            yield key, values


def _differing(keys: Iterable[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between the configs."""
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]


def _table(names: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td class=number>{escape(cell)}</td>' for cell in cells)}</tr>"
        for label, cells in rows
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _charts(histories: Mapping[str, History]) -> Iterator[Chart]:
    """Yield a chart for each metric, with one line per run that has the metric. Metrics that have a chart in the report
    on a single run come first."""
    for chart in (REWARD, *CHARTS):
        for line in chart.drawn:
            title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {line.label}"
            explanation = chart.explanation.split("; the band")[0]
            lines = _lines(histories, line.metrics[0])
            yield replace(chart, title=title, explanation=explanation, lines=lines, band=(), spread="")
    others = {metric for history in histories.values() for metric in history.columns} - charted_metrics()
    for metric in sorted(others):
        yield Chart(metric, "", _lines(histories, metric), place="other-charts")


def _lines(histories: Mapping[str, History], metric: str) -> tuple[Line, ...]:
    present = ((run, name) for run, (name, history) in enumerate(histories.items()) if len(history.finite(metric)))
    return tuple(Line(name, (metric,), run=run) for run, name in present)
