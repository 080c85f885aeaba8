"""Declare the charts of a run's metrics and pack their data for the page's script, which draws them with uPlot."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.report.history import History

NUM_COLORS = 5
"""Number of colors for lines, --series-1 to --series-5 in page.css."""

AXES = ("step", "tokens", "hours")
"""Quantities for the x-axis: the step number, and the cumulative tokens and hours at the end of the step."""

TOKENS, RATE, SECONDS = "data/tokens", "throughput/tokens_per_second", "time/step"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. Its values are the sum of `metrics` minus the sum of `minus`, and at least 0 if `minus` is not
    empty. `run` is the index of its run in a comparison."""

    label: str
    metrics: tuple[str, ...]
    minus: tuple[str, ...] = ()
    run: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of metrics.

    Attributes:
        lines: the lines, or pairs (metric, label) for lines of one metric.
        band: metrics that bound the shaded area around the first line.
        spread: metric whose value is the distance between the first line and the bounds of the shaded area.
        share: whether the values are fractions between 0 and 1.
        log: whether the y-axis is logarithmic by default. Values that are not positive are then omitted.
        stack: whether lines are stacked as areas.
        wide: whether the chart is as wide as the page.
        place: id of the element that contains the chart.
    """

    title: str
    explanation: str
    lines: tuple[Line | tuple[str, str], ...]
    band: tuple[str, ...] = ()
    spread: str = ""
    share: bool = False
    log: bool = False
    stack: bool = False
    wide: bool = False
    place: str = "charts"

    @property
    def drawn(self) -> tuple[Line, ...]:
        return tuple(line if isinstance(line, Line) else Line(line[1], (line[0],)) for line in self.lines)


REWARD = Chart(
    "Reward",
    "Mean over the samples in a step; the band is ± one standard deviation.",
    (("reward/mean", "mean"),),
    spread="reward/std",
    wide=True,
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
        band=("response/length_min", "response/length_max"),
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
        "|trainer log-prob − engine log-prob| of sampled tokens, before the step's updates. Excludes stale samples.",
        (("mismatch/logprob_abs_mean", "mean"), ("mismatch/logprob_abs_max", "largest")),
        log=True,
    ),
    Chart(
        "Policy lag",
        "|trainer log-prob − engine log-prob| of stale samples, which were sampled with earlier weights.",
        (("policy_lag/logprob_abs_mean", "mean"), ("policy_lag/logprob_abs_max", "largest")),
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
PHASE_TIMES = tuple(f"time/{phase}" for phase in PHASES)
TIME = Chart(
    "Time by phase",
    "Seconds per step in each phase.",
    (*zip(PHASE_TIMES, PHASES, strict=True), Line("other", (SECONDS,), PHASE_TIMES)),
    stack=True,
)
AGE = re.compile(r"weights/staleness_([0-9]{1,9})_share")


def charts_of(history: History) -> Iterator[Chart]:
    """Yield the charts of known metrics, each with the lines for which the run has values."""
    for chart in (REWARD, *CHARTS, TIME, _ages(history)):
        lines = tuple(line for line in chart.drawn if any(len(history.finite(metric)) for metric in line.metrics))
        if lines and lines != (Line("other", (SECONDS,), PHASE_TIMES),):
            yield replace(chart, lines=lines)


def other_charts(history: History, excluded: str | tuple[str, ...]) -> Iterator[Chart]:
    """Yield a chart for each remaining metric whose name starts with no prefix in `excluded`."""
    for metric in sorted(set(history.columns) - charted_metrics()):
        if not metric.startswith(excluded) and not AGE.fullmatch(metric) and len(history.finite(metric)):
            yield Chart(metric, "", ((metric, metric),), place="other-charts")


def charted_metrics() -> set[str]:
    """Return the names of the metrics that the charts in this module show."""
    charts = (REWARD, *CHARTS, TIME)
    lines = {metric for chart in charts for line in chart.drawn for metric in (*line.metrics, *line.minus)}
    return lines | {metric for chart in charts for metric in (*chart.band, chart.spread) if metric}


def _ages(history: History) -> Chart:
    """Return the chart of the samples' staleness. The largest values are combined into one line."""
    ages = {int(match[1]): match[0] for match in map(AGE.fullmatch, history.columns) if match is not None}
    last = NUM_COLORS - 1
    lines = [Line(str(age), (ages[age],)) for age in sorted(ages) if age < last]
    if older := tuple(ages[age] for age in sorted(ages) if age >= last):
        lines.append(Line(f"{last} or more", older))
    return Chart(
        "Staleness of samples",
        "Fraction of a step's samples by staleness: weight versions between the oldest token and the trained weights.",
        tuple(lines),
        share=True,
        stack=True,
    )


def axes_of(history: History) -> dict[str, np.ndarray]:
    """Return axis name -> each step's position on this x-axis, float64 [S]. Axes without data are omitted."""
    seconds = np.nan_to_num(history[SECONDS])
    rates = np.nan_to_num(history[RATE])
    tokens = np.where(np.isfinite(history[TOKENS]), history[TOKENS], np.round(rates * seconds))
    axes = {"step": history.steps.astype(np.float64), "tokens": np.cumsum(tokens), "hours": np.cumsum(seconds) / 3600}
    return {name: values for name, values in axes.items() if name == "step" or (len(values) and values[-1] > 0)}


def tokens_per_second(history: History) -> float | None:
    """Return the tokens of all steps divided by the seconds of these steps. Return None if no step has both."""
    rates, seconds = history[RATE], history[SECONDS]
    has_both = np.isfinite(rates) & np.isfinite(seconds)
    total = seconds[has_both].sum()
    return float((rates[has_both] * seconds[has_both]).sum() / total) if total > 0 else None


def describe(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return the charts as JSON values for the page's script."""
    return [asdict(replace(chart, lines=chart.drawn)) for chart in charts]


def pack(history: History, start: int = 0) -> dict[str, dict[str, str]]:
    """Return the steps from index `start` on as base64: axes in 64-bit and metrics in 32-bit floats, little-endian."""
    with np.errstate(over="ignore"):  # values out of range become infinite and are not drawn
        metrics = {name: _base64(values[start:].astype("<f4")) for name, values in history.columns.items()}
    return {
        "axes": {name: _base64(values[start:].astype("<f8")) for name, values in axes_of(history).items()},
        "metrics": metrics,
    }


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def data_json(charts: Sequence[Chart], runs: Mapping[str, History]) -> str:
    """Return the charts and the runs' data as JSON that is safe inside a script element."""
    packed = [{"name": name} | pack(history) for name, history in runs.items()]
    return script_json({"charts": describe(charts), "runs": packed})


def script_json(value: object) -> str:
    """Return JSON that is safe inside a script element because it cannot contain a closing tag."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def resource(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
