"""Draws charts of a run's metrics as inline SVG. Colors are taken from the page's CSS variables."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megarl.report.history import History

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

MAX_POINTS = 400  # longer histories are averaged in bins
MARKED_POINTS = 40  # shorter lines are drawn with markers
PALETTE = {  # each color is replaced with the CSS variable of this name
    "--ink": "#1c2127",
    "--muted": "#66707b",
    "--grid": "#e3e6ea",
    "--series-1": "#2563a8",
    "--series-2": "#d9772b",
    "--series-3": "#3f8f5f",
    "--series-4": "#8a5aa8",
    "--series-5": "#9aa3ad",
}
SERIES = tuple(color for name, color in PALETTE.items() if name.startswith("--series"))
STYLE: dict[RcKeyType, Any] = {
    "svg.hashsalt": "megarl",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": PALETTE["--ink"],
    "axes.edgecolor": PALETTE["--grid"],
    "axes.labelcolor": PALETTE["--muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "grid.color": PALETTE["--grid"],
    "grid.linewidth": 0.8,
    "xtick.color": PALETTE["--grid"],
    "ytick.color": PALETTE["--grid"],
    "xtick.labelcolor": PALETTE["--muted"],
    "ytick.labelcolor": PALETTE["--muted"],
    "legend.frameon": False,
    "legend.fontsize": 9,
}
Band = Callable[[History], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart of metrics over steps.

    Attributes:
        lines: a pair (metric, legend label) for each line.
        band: bounds of the shaded area around the first line.
        share: whether the values are fractions between 0 and 1.
        log: whether to use a logarithmic axis if all values are positive.
    """

    title: str
    explanation: str
    lines: tuple[tuple[str, str], ...]
    band: Band | None = None
    share: bool = False
    log: bool = False


REWARD = Chart(
    "Reward",
    "Mean over the samples in a step; the band is ± one standard deviation.",
    (("reward/mean", "mean"),),
    band=lambda history: (
        history["reward/mean"] - history["reward/std"],
        history["reward/mean"] + history["reward/std"],
    ),
)
CHARTS = (
    Chart("Negative log-likelihood", "Mean over the trained tokens, in nats per token.", (("policy/nll", "mean"),)),
    Chart("Preference loss", "Mean over the pairs in a step.", (("preference/loss", "mean"),)),
    Chart(
        "Preference accuracy",
        "Fraction of pairs in which the model prefers the better response.",
        (("preference/accuracy", "accuracy"),),
        share=True,
    ),
    Chart("Label loss", "Mean over the labeled tokens in a step.", (("label/loss", "mean"),)),
    Chart(
        "Label accuracy",
        "Fraction of labeled tokens whose score has the correct sign.",
        (("label/accuracy", "accuracy"),),
        share=True,
    ),
    Chart(
        "Response length",
        "Mean number of tokens per response; the band is the range from shortest to longest.",
        (("response/length_mean", "mean"),),
        band=lambda history: (history["response/length_min"], history["response/length_max"]),
    ),
    Chart(
        "Truncated responses",
        "Fraction of responses that reached the token limit.",
        (("response/truncated_frac", "truncated"),),
        share=True,
    ),
    Chart("Entropy", "Entropy of the policy, in nats per token.", (("policy/entropy", "entropy"),)),
    Chart("Gradient norm", "Global norm before clipping.", (("policy/grad_norm", "norm"),)),
    Chart(
        "Routing mismatch",
        "Fraction of token-layer pairs for which the trainer and the engine select different experts.",
        (("policy/routes_differ", "different experts"),),
        share=True,
    ),
    Chart(
        "Expert load imbalance",
        "Load of a layer's busiest expert relative to the mean, minus 1 (MaxVio), averaged over layers.",
        (("policy/max_vio", "MaxVio"),),
    ),
    Chart(
        "Trainer–rollout mismatch",
        "|trainer log-prob − engine log-prob| of the sampled tokens, before the step's updates.",
        (("mismatch/logprob_abs_mean", "mean"), ("mismatch/logprob_abs_max", "largest")),
        log=True,
    ),
    Chart(
        "Effective sample size",
        "Effective sample size of the engine's tokens under the trainer's policy, as a fraction of their number.",
        (("mismatch/effective_frac", "effective"),),
        share=True,
    ),
    Chart(
        "Drift within a step",
        "|log-prob − log-prob at the start of the step| of the sampled tokens, from a step's second update on.",
        (("policy/drift_abs_mean", "mean"), ("policy/drift_abs_max", "largest")),
        log=True,
    ),
    Chart("Throughput", "Tokens per second over the whole step.", (("throughput/tokens_per_second", "tokens/s"),)),
    Chart(
        "Discarded tokens",
        "Tokens in rollouts that were too stale to train on, including rollouts aborted during sampling.",
        (("rollout/dropped_tokens", "dropped"), ("rollout/aborted_tokens", "of which aborted")),
    ),
    Chart(
        "Idle time",
        "Fraction of a step in which a role's processes were idle, averaged over the processes.",
        (("idle/engines", "engines"), ("idle/actor", "actor"), ("idle/critic", "critic")),
        share=True,
    ),
    Chart(
        "Memory",
        "Peak host memory of the run's processes in GB. PSS counts shared pages once.",
        (("memory/peak_pss_gb", "PSS"), ("memory/peak_rss_gb", "RSS")),
    ),
)
PHASES = ("rollout", "reward", "train", "refit")
PHASE_TITLE = "Time by phase"
PHASE_EXPLANATION = "Seconds per step in each phase."
AGE = re.compile(r"weights/staleness_([0-9]{1,9})_share")
AGE_TITLE = "Staleness of samples"
AGE_EXPLANATION = (
    "Fraction of a step's samples by staleness: weight versions between the oldest token and the trained weights."
)
WIDE, NARROW = (10.4, 3.1), (5.0, 2.5)  # in inches; all charts are shown at the same scale


def charted_metrics() -> set[str]:
    """Return the names of the metrics that the charts in this module show."""
    lines = {metric for chart in (REWARD, *CHARTS) for metric, _ in chart.lines}
    bands = {"reward/std", "response/length_min", "response/length_max"}
    return lines | bands | {"time/step"} | {f"time/{phase}" for phase in PHASES}


def draw(chart: Chart, history: History, size: tuple[float, float] = NARROW) -> str | None:
    """Draw a chart as an <svg> element. Return None if the run has none of the chart's metrics."""
    if not any(len(history.finite(metric)) for metric, _ in chart.lines):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(size, history.steps)
        for index, (metric, label) in enumerate(chart.lines):
            band = chart.band(history) if chart.band and index == 0 else (history[metric], history[metric])
            _draw_line(axes, history.steps, history[metric], band, label, SERIES[index])
        if len(chart.lines) > 1:
            _legend(axes)
        _scale(axes, chart, [history.finite(metric) for metric, _ in chart.lines])
        return as_svg(figure, chart.title)


def draw_overlaid(
    title: str,
    metric: str,
    histories: Mapping[str, History],
    chart: Chart | None = None,
    size: tuple[float, float] = NARROW,
) -> str | None:
    """Draw one metric for several runs as an <svg> element. Return None if no run has the metric.

    Args:
        histories: the history of each run, keyed by run name.
        chart: the metric's chart in the report on a single run. The axis is formatted in the same way.
    """
    present = {name: history for name, history in histories.items() if len(history.finite(metric))}
    if not present:
        return None
    with matplotlib.rc_context(STYLE):
        steps = np.concatenate([history.steps for history in present.values()])
        figure, axes = _axes(size, (steps.min(), steps.max()))
        for name, color in zip(histories, SERIES, strict=False):
            if name in present:
                history = present[name]
                _draw_line(axes, history.steps, history[metric], (history[metric], history[metric]), name, color)
        _legend(axes)
        if chart is not None:
            _scale(axes, chart, [history.finite(metric) for history in present.values()])
        return as_svg(figure, title)


def draw_phases(history: History, size: tuple[float, float] = NARROW) -> str | None:
    """Draw the duration of each phase as a stacked chart over steps. Return None if the run has no phase times."""
    phases = {phase: np.nan_to_num(history[f"time/{phase}"]) for phase in PHASES}
    other = np.nan_to_num(history["time/step"]) - sum(phases.values())
    phases["other"] = np.maximum(other, 0.0)  # overlapping phases may sum to more than the step
    if not any(times.any() for times in phases.values()):
        return None
    return _draw_stack(PHASE_TITLE, phases, history.steps, size)


def draw_ages(history: History, size: tuple[float, float] = NARROW) -> str | None:
    """Draw the fraction of samples with each staleness as a stacked chart over steps. Return None for a synchronous
    run. The largest staleness values are combined into one series."""
    shares = {int(match[1]): np.nan_to_num(history[name]) for name in history.columns if (match := AGE.fullmatch(name))}
    if not shares:
        return None
    last = len(SERIES) - 1
    parts = {str(age): shares[age] for age in sorted(shares) if age < last}
    if older := [values for age, values in shares.items() if age >= last]:
        parts[f"{last} or more"] = np.sum(older, axis=0)
    return _draw_stack(AGE_TITLE, parts, history.steps, size)


def _draw_stack(title: str, parts: Mapping[str, np.ndarray], steps: np.ndarray, size: tuple[float, float]) -> str:
    starts = bin_starts(len(steps))
    edges = np.append(steps[starts], steps[-1] + 1) - 0.5
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(size, steps)
        baseline = np.zeros(len(starts))
        for (label, values), color in zip(parts.items(), SERIES, strict=False):
            top = baseline + bin_means(values, starts)
            axes.stairs(top, edges, baseline=baseline, fill=True, color=color, linewidth=0, label=label)
            baseline = top
        axes.set_ylim(bottom=0)
        _legend(axes)
        return as_svg(figure, title)


def bin_starts(num_steps: int) -> np.ndarray:
    """Split the steps into at most MAX_POINTS bins of nearly equal size. Return the first index of each bin as int64
    [B]."""
    num_bins = min(num_steps, MAX_POINTS)
    return np.arange(num_bins) * num_steps // max(num_bins, 1)


def bin_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values in each bin as float64 [B]. The mean is NaN for bins without finite
    values."""
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    return np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)


def _draw_line(
    axes: Axes, steps: np.ndarray, values: np.ndarray, band: tuple[np.ndarray, np.ndarray], label: str, color: str
) -> None:
    """Draw the mean of each bin as a line, and the extremes of the band in each bin as a shaded area."""
    starts = bin_starts(len(steps))
    x, means = steps[starts], bin_means(values, starts)
    low, high = np.fmin.reduceat(band[0], starts), np.fmax.reduceat(band[1], starts)
    if np.any(low < high):
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    marker = "o" if len(x) < MARKED_POINTS else None
    axes.plot(x, means, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=label)


def _axes(size: tuple[float, float], steps: Sequence[int] | np.ndarray) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, facecolor="none", layout="constrained")
    axes = figure.add_subplot(facecolor="none")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_xlim(steps[0] - 0.6, steps[-1] + 0.6)
    axes.set_xlabel("step")
    return figure, axes


def _scale(axes: Axes, chart: Chart, values: Sequence[np.ndarray]) -> None:
    if chart.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(-0.02, 1.02)
    if chart.log and all((line > 0).all() for line in values):
        axes.set_yscale("log")


def _legend(axes: Axes) -> None:
    """Draw the legend as one row above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, handlelength=1.2, borderaxespad=0.2)


def as_svg(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # remove the XML prologue
    for name, color in PALETTE.items():
        svg = svg.replace(color, f"var({name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def figure(title: str, explanation: str, svg: str | None, wide: bool = False) -> str:
    if svg is None:
        return ""
    caption = f"<figcaption>{escape(title)}<span>{escape(explanation)}</span></figcaption>"
    return f"<figure{' class=wide' if wide else ''}>{caption}{svg}</figure>"


def report_figures(history: History) -> str:
    """Return the figures of a report on one run, which are the charts of known metrics."""
    figures = [figure(REWARD.title, REWARD.explanation, draw(REWARD, history, WIDE), wide=True)]
    figures += [figure(chart.title, chart.explanation, draw(chart, history)) for chart in CHARTS]
    figures.append(figure(PHASE_TITLE, PHASE_EXPLANATION, draw_phases(history)))
    figures.append(figure(AGE_TITLE, AGE_EXPLANATION, draw_ages(history)))
    return "".join(figures) or '<p class="note">No step has finished yet.</p>'
