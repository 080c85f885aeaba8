"""The charts' declarations and data. tests/browser checks how a browser draws them."""

import base64
import json

import numpy as np
import pytest

from megarl.report.charts import (
    AXES,
    CHARTS,
    NUM_COLORS,
    REWARD,
    Chart,
    axes_of,
    charted_metrics,
    charts_of,
    data_json,
    other_charts,
    pack,
    tokens_per_second,
)
from megarl.report.history import History, read_history


def history(num_steps, **columns):
    named = {name.replace("__", "/"): np.asarray(values, dtype=float) for name, values in columns.items()}
    return History(np.arange(1, num_steps + 1), named, {}, [])


def unpacked(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


def test_packed_values_equal_the_metrics_file(tmp_path):
    """Axes are exact, and metrics have the precision of a 32-bit float."""
    rows = [{"step": step, "a": 1 / step, "time/step": 1.5} for step in range(2**24, 2**24 + 5)]
    rows[3]["a"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = pack(read_history(tmp_path / "metrics.jsonl"))
    assert unpacked(packed["axes"]["step"], "<f8").tolist() == [row["step"] for row in rows]
    values = unpacked(packed["metrics"]["a"], "<f4")
    expected = [np.float32(np.nan if row["a"] is None else row["a"]) for row in rows]
    np.testing.assert_array_equal(values, expected)


def test_pack_returns_only_the_steps_from_start():
    run = history(5, a=[1, 2, 3, 4, 5], time__step=[3600] * 5)
    packed = pack(run, start=3)
    assert unpacked(packed["metrics"]["a"], "<f4").tolist() == [4, 5]
    assert unpacked(packed["axes"]["hours"], "<f8").tolist() == [4, 5]  # from the start of the run


def test_values_beyond_32_bits_are_infinite():
    assert np.isinf(unpacked(pack(history(1, a=[1e300]))["metrics"]["a"], "<f4")).all()


def test_axes_are_sums_over_the_steps():
    run = history(3, time__step=[1800.0, np.nan, 3600.0], throughput__tokens_per_second=[10.0, np.nan, 20.0])
    axes = axes_of(run)
    assert tuple(axes) == AXES
    assert axes["hours"].tolist() == [0.5, 0.5, 1.5] and axes["tokens"].tolist() == [18000, 18000, 90000]
    assert axes_of(history(2, data__tokens=[5, 6], time__step=[1, 1]))["tokens"].tolist() == [5, 11]
    assert tuple(axes_of(history(2, a=[1, 2]))) == ("step",)
    assert axes_of(history(0))["step"].tolist() == []


def test_tokens_per_second_is_a_ratio_of_totals():
    """The mean of the rates would be 505."""
    run = history(3, time__step=[1.0, 99.0, np.nan], throughput__tokens_per_second=[1000.0, 10.0, 7.0])
    assert tokens_per_second(run) == (1000 + 990) / 100
    assert tokens_per_second(history(1, time__step=[1.0])) is None


def test_charts_have_only_the_lines_of_the_run():
    run = history(2, idle__engines=[0.1, 0.2], idle__critic=[np.nan, np.nan], reward__mean=[1, 2])
    charts = {chart.title: chart for chart in charts_of(run)}
    assert list(charts) == ["Reward", "Idle time"]
    assert [line.label for line in charts["Idle time"].lines] == ["engines"]


def test_phases_are_followed_by_the_rest_of_the_step():
    times = {"time__rollout": [4.0], "time__train": [3.0], "time__step": [10.0]}
    [chart] = [chart for chart in charts_of(history(1, **times)) if chart.title == "Time by phase"]
    assert chart.stack and [line.label for line in chart.lines] == ["rollout", "train", "other"]
    assert chart.lines[-1].metrics == ("time/step",)
    assert set(chart.lines[-1].minus) == {"time/rollout", "time/reward", "time/train", "time/refit"}
    assert list(charts_of(history(1, time__step=[10.0]))) == []


def test_oldest_samples_share_one_line():
    shares = {f"weights__staleness_{age}_share": [0.125] for age in range(8)}
    [chart] = charts_of(history(1, **shares))
    assert [line.label for line in chart.lines] == ["0", "1", "2", "3", "4 or more"] and chart.stack
    assert chart.lines[-1].metrics == tuple(f"weights/staleness_{age}_share" for age in range(4, 8))


def test_every_other_metric_has_a_chart():
    run = history(1, reward__mean=[0.5], evaluation__a=[1.0], own__x=[2.0], weights__staleness_0_share=[1.0])
    assert [chart.title for chart in other_charts(run, "evaluation/")] == ["own/x"]


@pytest.mark.parametrize("chart", [REWARD, *CHARTS], ids=lambda chart: chart.title)
def test_declared_charts_are_shown_if_the_run_has_their_metrics(chart):
    run = history(1, **{metric.replace("/", "__"): [0.5] for metric in charted_metrics()})
    [shown] = [item for item in charts_of(run) if item.title == chart.title]
    assert shown.lines == chart.drawn and len(shown.lines) <= NUM_COLORS
    assert set(chart.band) | ({chart.spread} - {""}) <= charted_metrics()


def test_data_cannot_close_its_script_element():
    attack = "</script><img src=x>&"
    text = data_json([Chart(attack, "", ((attack, "a"),))], {attack: history(1, **{attack: [1.0]})})
    assert not set("<>&") & set(text)
    data = json.loads(text)
    assert data["charts"][0]["title"] == data["runs"][0]["name"] == attack
    assert list(data["runs"][0]["metrics"]) == [attack]
