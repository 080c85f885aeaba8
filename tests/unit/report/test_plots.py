import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from megarl.report import plots
from megarl.report.history import History
from tests.marks import exhaustive_but

SVG = "{http://www.w3.org/2000/svg}"


def history(num_steps, **columns):
    named = {name.replace("__", "/"): np.asarray(values, dtype=float) for name, values in columns.items()}
    return History(np.arange(1, num_steps + 1), named, {}, [])


@pytest.mark.parametrize("num_steps", [1, 2, plots.MAX_POINTS, plots.MAX_POINTS + 1, 10_000])
def test_bins_tile_the_steps_evenly(num_steps):
    starts = plots.bin_starts(num_steps)
    sizes = np.diff(np.append(starts, num_steps))
    assert starts[0] == 0
    assert len(starts) == min(num_steps, plots.MAX_POINTS)
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1


def test_bin_means_skip_nonfinite_values():
    values = np.array([1.0, np.nan, 3.0, np.nan, np.inf, 5.0, 6.0])
    starts = np.array([0, 3, 5])
    expected = [2.0, np.nan, 5.5]
    np.testing.assert_array_equal(plots.bin_means(values, starts), expected)


def test_line_of_a_long_run_has_at_most_max_points():
    for num_steps in (3, 10_000):
        svg = plots.draw(plots.REWARD, history(num_steps, reward__mean=np.linspace(0, 1, num_steps)))
        line = re.search(r'<g id="line2d_\d+">\s*<path d="([^"]*)"[^>]*var\(--series-1\)', svg)
        num_points = len(re.findall("[ML]", line[1]))
        # matplotlib drops points that lie on a straight line
        assert 2 <= num_points <= plots.MAX_POINTS


def test_spike_in_a_long_run_stays_visible():
    """The mean of its bin hides the spike, but the shaded area and the axis include it."""
    values = np.ones(10_000)
    values[5000] = 200.0
    chart = plots.Chart("Gradient norm", "", (("policy/grad_norm", "norm"),))
    assert max(y_labels(plots.draw(chart, history(10_000, policy__grad_norm=values)))) >= 150


def y_labels(svg):
    (axis,) = [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("id") == "matplotlib.axis_2"]
    return [float(text.text.replace("−", "-")) for text in axis.iter(f"{SVG}text")]


def one_step():
    return history(1, **{metric.replace("/", "__"): [0.5] for metric in plots.charted_metrics()})


ONE_OF_EACH_KIND = {
    (len(chart.lines), chart.band is not None, chart.share, chart.log): chart for chart in plots.CHARTS
}.values()


@pytest.mark.parametrize(
    "chart",
    exhaustive_but([plots.REWARD, *plots.CHARTS], plots.REWARD, *ONE_OF_EACH_KIND),
    ids=lambda chart: chart.title,
)
def test_one_step_draws_every_chart(chart):
    svg = plots.draw(chart, one_step())
    ElementTree.fromstring(svg)
    assert re.search(r"<use [^>]*fill: var\(--series-1\)", svg)  # its one point is marked


def test_one_step_draws_the_phases():
    ElementTree.fromstring(plots.draw_phases(one_step()))


def test_draw_returns_none_without_values():
    assert plots.draw(plots.REWARD, history(0)) is None
    assert plots.draw(plots.REWARD, history(2, reward__mean=[np.nan, np.nan])) is None
    assert plots.draw_phases(history(0)) is None
    assert plots.draw_phases(history(2)) is None


def heights(svg):
    """Return the height of each stacked part in SVG units, by color name."""
    heights_by_color = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        color = re.search(r"fill: var\((--series-\d)\)", path.get("style", ""))
        ys = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d"))]
        if color and path.get("clip-path"):
            heights_by_color[color[1]] = max(ys) - min(ys)
    return heights_by_color


def test_phases_are_stacked_up_to_the_step_time():
    """Rollout, train and refit take 9 of 10 s. The remaining second is shown as other."""
    times = {"time__rollout": [4.0], "time__train": [3.0], "time__refit": [2.0], "time__step": [10.0]}
    drawn = heights(plots.draw_phases(history(1, **times)))
    assert drawn.keys() == {"--series-1", "--series-2", "--series-3", "--series-4", "--series-5"}
    unit = drawn["--series-1"] / 4
    reference = {"--series-2": 0.0, "--series-3": 3.0, "--series-4": 2.0, "--series-5": 1.0}
    for color, seconds in reference.items():
        assert drawn[color] / unit == pytest.approx(seconds, abs=1e-3)


def test_staleness_is_stacked_with_one_part_for_the_oldest():
    shares = [0.5, 0.25, 0.0, 0.0, 0.05, 0.0, 0.0, 0.2]
    svg = plots.draw_ages(
        history(1, **{f"weights__staleness_{age}_share": [share] for age, share in enumerate(shares)})
    )
    drawn = heights(svg)
    unit = drawn["--series-1"] / 0.5
    reference = {"--series-1": 0.5, "--series-2": 0.25, "--series-3": 0.0, "--series-4": 0.0, "--series-5": 0.25}
    assert {color: height / unit for color, height in drawn.items()} == pytest.approx(reference, abs=1e-3)
    assert "4 or more" in svg
    assert plots.draw_ages(history(1, weights__staleness_max=[1.0])) is None


def test_charts_are_deterministic_and_use_css_variables():
    columns = history(3, reward__mean=[0.1, 0.2, 0.3], reward__std=[0.1, 0.1, 0.1])
    svg = plots.draw(plots.REWARD, columns)
    assert svg == plots.draw(plots.REWARD, columns)
    assert not set(re.findall(r"#[0-9a-f]{6}", svg)) - {"#000000"}
    assert "var(--series-1)" in svg and "var(--muted)" in svg


def test_drawing_does_not_change_matplotlib_settings():
    before = dict(matplotlib.rcParams)
    plots.draw(plots.REWARD, history(1, reward__mean=[0.5]))
    assert dict(matplotlib.rcParams) == before


def test_title_is_escaped():
    chart = plots.Chart('<b>"', "", (("a", "a"),))
    assert ElementTree.fromstring(plots.draw(chart, history(1, a=[1.0]))).get("aria-label") == '<b>"'


def test_log_axis_requires_positive_values():
    chart = plots.Chart("x", "", (("a", "a"),), log=True)
    logarithmic = plots.draw(chart, history(2, a=[1e-6, 1e-2]))
    linear = plots.draw(chart, history(2, a=[0.0, 1e-2]))
    assert "tspan" in logarithmic  # the exponent of a power of ten
    assert "tspan" not in linear and max(y_labels(linear)) == 0.01
