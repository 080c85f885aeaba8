"""Renders a page that compares runs: overlaid curves, config differences and final results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from megarl.config import document
from megarl.config.document import leaves
from megarl.core.errors import UserError
from megarl.core.files import replace_text
from megarl.report.page import Contents, read_contents, resource, summary
from megarl.report.plots import CHARTS, REWARD, SERIES, WIDE, charted_metrics, draw_overlaid, figure

ABSENT = "–"
NAMES = ("run.name", "run.folder", "run.replace", "resume")
"""Config keys to exclude from the comparison because they differ between any two runs."""


def write(folders: Sequence[Path]) -> Path:
    """Write a comparison of runs to the first run's folder and return its path. Raise a UserError if one of the folders
    is not a run folder, or there are more runs than chart colors."""
    if len(folders) > len(SERIES):
        raise UserError(
            f"{len(folders)} runs: a chart can show at most {len(SERIES)}. Fix: pass at most {len(SERIES)} runs"
        )
    runs = [read_contents(folder) for folder in folders]
    others = "_".join(Path(folder).resolve().name for folder in folders[1:])
    out = Path(folders[0]) / f"against_{others}.html"
    replace_text(out, render(runs, [str(folder) for folder in folders]))
    return out


def render(runs: Sequence[Contents], folders: Sequence[str]) -> str:
    """Return the comparison page as HTML. The page has no scripts and loads no external resources."""
    names, figures = labels([run.name for run in runs], folders), [dict(summary(run)) for run in runs]
    configs = [dict(leaves(document.read(run.config_text) or {})) for run in runs]
    differences = list(_differences(configs))
    count = {0: "No keys differ.", 1: "One key differs."}.get(len(differences), f"{len(differences)} keys differ.")
    return Template(resource("comparison.html")).substitute(
        title=escape(" and ".join(names)),
        subtitle=escape(" · ".join(folders)),
        style=resource("page.css"),
        figures=_table(names, ((label, [column[label] for column in figures]) for label in figures[0])),
        config_note=count,
        differences=_table(names, differences) if differences else "",
        charts=_charts(runs, names),
        other_charts=_other_charts(runs, names),
    )


def labels(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return unique labels for the runs: the run names if they are unique, else the folder names if those are unique,
    else the folder paths."""
    candidates = (names, [Path(folder).resolve().name for folder in folders], folders)
    return list(next((candidate for candidate in candidates if len(set(candidate)) == len(candidate)), folders))


def _differences(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [str(config[key]) if key in config else ABSENT for config in configs]
        if key not in NAMES and len(set(values)) > 1:
            yield key, values


def _table(names: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    body = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td class=number>{escape(cell)}</td>' for cell in cells)}</tr>"
        for label, cells in rows
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _charts(runs: Sequence[Contents], names: Sequence[str]) -> str:
    """Return a figure for each metric that has a chart in the report on a single run."""
    histories = dict(zip(names, (run.history for run in runs), strict=True))
    figures = []
    for chart in (REWARD, *CHARTS):
        for metric, label in chart.lines:
            title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {label}"
            size = {"size": WIDE} if chart is REWARD else {}
            drawn = draw_overlaid(title, metric, histories, chart, **size)
            figures.append(figure(title, chart.explanation.split("; the band")[0], drawn, wide=chart is REWARD))
    return "".join(figures) or '<p class="note">No step has finished yet.</p>'


def _other_charts(runs: Sequence[Contents], names: Sequence[str]) -> str:
    histories = dict(zip(names, (run.history for run in runs), strict=True))
    metrics = sorted({metric for run in runs for metric in run.history.columns} - charted_metrics())
    return "".join(figure(metric, "", draw_overlaid(metric, metric, histories)) for metric in metrics)
