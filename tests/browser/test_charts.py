"""The charts of the report, the comparison and the live page, in Chromium."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import report
from megarl.report import comparison
from tests.browser.chromium import Tab, browse_with
from tests.live_report import serving
from tests.timing import PAGE_CPU_S

NUM_STEPS = 50
HOSTILE = "own/</script><img src=x onerror=alert(1)>"


def row(step: int, scale: float = 1.0) -> dict[str, float]:
    named = {f"evaluation/a/{name}": step / 100 for name in ("avg@1", "avg@1_low", "avg@1_high")}
    return {
        "step": step,
        "reward/mean": scale * math.sin(step),
        "reward/std": 0.1,
        "policy/entropy": 1 / step,
        "mismatch/logprob_abs_mean": 10.0**-step if step < 9 else 0.0,
        "time/step": 36.0,
        "time/rollout": 20.0,
        "time/train": 10.0,
        "throughput/tokens_per_second": 100.0 * step,
        HOSTILE: float(step),
        **(named if step % 10 == 0 else {}),
    }


def write_run(folder: Path, num_steps: int = NUM_STEPS, scale: float = 1.0) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"name": folder.name}))
    (folder / "config.resolved.yaml").write_text("run: {steps: 51}\n")
    add_steps(folder, range(1, num_steps + 1), scale)
    return folder


def add_steps(folder: Path, steps: range, scale: float = 1.0) -> None:
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.writelines(json.dumps(row(step, scale)) + "\n" for step in steps)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("charts") / "first")
    report.write(folder)
    return folder


@pytest.fixture
def tab(run: Path, tmp_path: Path) -> Iterator[Tab]:
    with browse_with(tmp_path, (run / "report.html").as_uri(), height=2400) as tab:
        tab.until("drawn('Reward') && drawn('Time by phase')".replace("drawn", DRAWN))
        yield tab
        assert tab.problems == []


DRAWN = "((title) => [...figures.values()].find((figure) => figure.chart.title === title && figure.plot))"


def values_of(tab: Tab, title: str, line: int = 0) -> list[float | None]:
    """Return the drawn values of a line. Lines are in the order of the legend, except in stacks."""
    shown = f"figure.series.map((item, i) => item.shown ? figure.plot.data[i + 1] : null).filter(Boolean)[{line}]"
    return tab.eval(f"(() => {{ const figure = {DRAWN}('{title}'); return {shown}; }})()")


def legend_of(tab: Tab, title: str) -> str:
    return tab.eval(f"{DRAWN}('{title}').buttons.map((button) => button.textContent).join(', ')")


def plot_area(tab: Tab, title: str) -> tuple[float, float, float, float]:
    rectangle = f"{DRAWN}('{title}').plot.over.getBoundingClientRect()"
    return tuple(
        tab.eval(f"(() => {{ const {{x, y, width, height}} = {rectangle}; return [x, y, width, height]; }})()")
    )


def choose(tab: Tab, control: str, value: object) -> None:
    """Set a control and dispatch an input event, as a user's input does."""
    node = f"document.getElementById('{control}')"
    tab.eval(f"{node}.value = '{value}'; {node}.dispatchEvent(new Event('input'))")


def test_drawn_values_equal_the_metrics(tab: Tab) -> None:
    expected = [row(step) for step in range(1, NUM_STEPS + 1)]
    assert values_of(tab, "Entropy") == pytest.approx([line["policy/entropy"] for line in expected], rel=1e-6)
    assert values_of(tab, "Reward") == pytest.approx([line["reward/mean"] for line in expected], rel=1e-6)
    evaluated = values_of(tab, "Evaluation: a, avg@1")
    assert [step for step, value in enumerate(evaluated, start=1) if value is not None] == [10, 20, 30, 40, 50]
    assert legend_of(tab, "Time by phase") == "rollout 20, train 10, other 6"  # omits phases that the run lacks
    stacked = [values_of(tab, "Time by phase", line)[0] for line in range(3)]
    assert stacked == [36, 30, 20]
    tab.take_picture("charts")


def test_cursor_shows_values_in_all_charts(tab: Tab) -> None:
    x, y, width, height = plot_area(tab, "Reward")
    tab.mouse("mouseMoved", x + width * 19 / (NUM_STEPS - 1), y + height / 2)
    tab.until(f"{DRAWN}('Reward').at.textContent === 'step 20'")
    for title in ("Entropy", "Time by phase"):
        assert tab.eval(f"{DRAWN}('{title}').at.textContent") == "step 20"
    assert legend_of(tab, "Entropy") == "entropy 0.05"
    assert legend_of(tab, "Reward") == f"mean {math.sin(20):.4g}"
    tab.mouse("mouseMoved", 1, 1)
    tab.until(f"{DRAWN}('Entropy').at.textContent === ''")
    assert legend_of(tab, "Entropy") == "entropy 0.02"  # the legend shows the last value


def test_drag_zooms_all_charts_and_double_click_resets(tab: Tab) -> None:
    x, y, width, height = plot_area(tab, "Entropy")
    tab.drag(x + width / 4, y + height / 2, x + width / 2)
    tab.until("zoom !== null")
    scales = "[...figures.values()].filter((f) => f.plot).map((f) => [f.plot.scales.x.min, f.plot.scales.x.max])"
    for low, high in tab.eval(scales):
        assert low == pytest.approx(1 + 49 / 4, abs=0.3) and high == pytest.approx(1 + 49 / 2, abs=0.3)
    tab.double_click(x + width / 2, y + height / 2)
    tab.until("zoom === null")
    assert {tuple(scale) for scale in tab.eval(scales)} == {(1, NUM_STEPS)}


def test_keys_move_the_cursor_and_zoom(tab: Tab) -> None:
    tab.eval(f"{DRAWN}('Entropy').root.focus()")
    tab.key("ArrowRight")
    start = int(tab.eval(f"{DRAWN}('Reward').at.textContent").removeprefix("step "))
    tab.key("ArrowRight")
    assert tab.eval(f"{DRAWN}('Reward').at.textContent") == f"step {start + 1}"
    tab.key("+")
    assert tab.eval("zoom[1] - zoom[0]") == pytest.approx((NUM_STEPS - 1) / 2)
    tab.key("0")
    assert tab.eval("zoom") is None


def test_smoothing_is_a_normalized_exponential_average(tab: Tab) -> None:
    raw, weight = values_of(tab, "Entropy"), 0.9
    choose(tab, "smoothing", weight)
    # The closed form: Σ wⁿ⁻ⁱ·vᵢ / Σ wⁿ⁻ⁱ.
    weights = [[weight ** (n - i) for i in range(n + 1)] for n in range(len(raw))]
    expected = [sum(w * v for w, v in zip(row, raw, strict=False)) / sum(row) for row in weights]
    assert values_of(tab, "Entropy") == pytest.approx(expected, rel=1e-6)
    assert tab.eval(f"{DRAWN}('Entropy').series.map((item) => item.alpha)") == [0.25, 1]  # the raw line stays visible
    choose(tab, "smoothing", 0)
    assert values_of(tab, "Entropy") == raw


def test_log_axis_omits_values_that_are_not_positive(tab: Tab) -> None:
    distribution = f"{DRAWN}('Trainer–rollout mismatch').plot.scales.y.distr"
    assert tab.eval(distribution) == 3  # uPlot's logarithmic scale, chosen automatically
    values = values_of(tab, "Trainer–rollout mismatch")
    assert values[:8] == pytest.approx([10.0**-step for step in range(1, 9)]) and set(values[8:]) == {None}
    choose(tab, "y-axis", "linear")
    assert tab.eval(distribution) == 1 and values_of(tab, "Trainer–rollout mismatch")[8:] == [0] * 42
    assert tab.eval(f"{DRAWN}('Entropy').plot.scales.y.distr") == 1
    choose(tab, "y-axis", "log")
    assert tab.eval(f"{DRAWN}('Entropy').plot.scales.y.distr") == 3


def test_x_axis_shows_tokens_or_hours(tab: Tab) -> None:
    xs = f"{DRAWN}('Entropy').plot.data[0]"
    choose(tab, "x-axis", "hours")
    assert tab.eval(xs) == pytest.approx([step / 100 for step in range(1, NUM_STEPS + 1)])
    choose(tab, "x-axis", "tokens")
    assert tab.eval(xs) == [3600 * step * (step + 1) // 2 for step in range(1, NUM_STEPS + 1)]
    choose(tab, "x-axis", "step")
    assert tab.eval(xs) == list(range(1, NUM_STEPS + 1))


def test_legend_hides_lines(tab: Tab) -> None:
    button = "[...document.querySelectorAll('button.line')].find((node) => node.dataset.label === 'train')"
    tab.eval(f"{button}.focus()")
    tab.key(" ")
    assert tab.eval(f"{button}.getAttribute('aria-pressed')") == "false"
    assert [values_of(tab, "Time by phase", line)[0] for line in range(2)] == [26, 20]
    assert legend_of(tab, "Time by phase") == "rollout 20, train , other 6"
    tab.eval(f"{button}.click()")
    assert values_of(tab, "Time by phase")[0] == 36


def test_dark_mode_changes_the_colors(tab: Tab) -> None:
    stroke = f"{DRAWN}('Entropy').plot.series[1]._stroke"
    light = tab.eval(stroke)
    tab.prefer("dark")
    tab.until(f"{stroke} !== '{light}'")
    assert (light[:7], tab.eval(stroke)[:7]) == ("#2563a8", "#6aa5e6")
    assert tab.eval("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    tab.take_picture("charts_dark")


def test_metric_names_are_inserted_as_text(tab: Tab) -> None:
    assert tab.eval("document.querySelectorAll('img').length") == 0
    tab.eval("document.getElementById('others').open = true")
    tab.until(f"{DRAWN}({json.dumps(HOSTILE)})")
    titles = tab.eval("[...document.querySelectorAll('#other-charts figcaption')].map((node) => node.textContent)")
    assert titles == [HOSTILE]


def test_runs_of_different_lengths_share_a_chart(run: Path, tmp_path: Path) -> None:
    out = comparison.write([run, write_run(tmp_path / "second", 20, scale=2.0)])
    with browse_with(tmp_path, out.as_uri(), height=2400) as tab:
        tab.until(f"{DRAWN}('Reward')")
        first, second = values_of(tab, "Reward"), values_of(tab, "Reward", 1)
        assert second[:20] == pytest.approx([2 * value for value in first[:20]]) and len(first) == NUM_STEPS
        assert [value for value in second[20:] if value is not None] == []
        choose(tab, "x-axis", "hours")
        assert tab.eval(f"{DRAWN}('Reward').plot.data[0].length") == NUM_STEPS
        x, y, width, height = plot_area(tab, "Reward")
        tab.mouse("mouseMoved", x + width - 2, y + height / 2)
        tab.until(f"{DRAWN}('Reward').at.textContent !== ''")
        assert legend_of(tab, "Reward") == f"first {math.sin(50):.4g}, second {2 * math.sin(20):.4g}"
        tab.take_picture("comparison_charts")
        assert tab.problems == []


def test_live_charts_receive_only_new_steps(tmp_path: Path) -> None:
    """The drawn chart is kept: uPlot receives the new values."""
    run = write_run(tmp_path / "watched")
    with serving(run) as address, browse_with(tmp_path, address, height=2400) as tab:
        tab.until(f"{DRAWN}('Reward')")
        assert tab.eval("document.getElementById('live').textContent") == "live"
        tab.eval(f"window.before = {DRAWN}('Reward').plot")
        add_steps(run, range(51, 52))
        tab.until("runs[0].parts.length > 1")
        tab.until("document.getElementById('live').textContent === 'finished'")
        assert tab.eval(f"window.before === {DRAWN}('Reward').plot")
        assert values_of(tab, "Reward")[-1] == pytest.approx(math.sin(51), rel=1e-6)
        assert tab.eval("unpack(runs[0].parts[1].metrics['reward/mean'], Float32Array).length") == 1
        assert tab.eval("runs[0].axes.get('hours').at(-1)") == pytest.approx(0.51)
        tab.take_picture("live")
        assert tab.problems == []


def test_long_run_opens_with_few_charts(tmp_path: Path) -> None:
    """The run has 5,000 steps with 120 metrics each."""
    folder = write_run(tmp_path / "long", 1)
    metrics = {f"own/{number:03d}": float(number) for number in range(108)}
    with (folder / "metrics.jsonl").open("w") as lines:
        lines.writelines(json.dumps({**row(step), **metrics}) + "\n" for step in range(1, 5001))
    assert len({**row(10), **metrics}) - 1 == 120
    with browse_with(tmp_path, report.write(folder).as_uri()) as tab:
        tab.until(f"{DRAWN}('Reward')")
        assert tab.cpu_seconds() < PAGE_CPU_S
        assert tab.eval("figures.size") > 110 > 20 > tab.eval("document.querySelectorAll('canvas').length")
        tab.eval("document.getElementById('others').open = true; window.scrollTo(0, document.body.scrollHeight)")
        tab.until(f"{DRAWN}('own/107')")
        assert tab.eval("document.querySelectorAll('canvas').length") < 20  # charts out of view are dropped
        assert tab.problems == []
