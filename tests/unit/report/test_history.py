import json

import numpy as np

from megarl.report.history import read_history


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_history_has_a_column_per_metric(tmp_path):
    path = write_lines(
        tmp_path / "metrics.jsonl",
        {"step": 1, "reward/mean": 0.25, "policy/loss": None, "nonfinite": ["policy/loss"]},
        {"step": 2, "reward/mean": 0.5, "policy/loss": 3, "kl/mean": 0.125},
        "",
    )
    history = read_history(path)
    assert history.steps.tolist() == [1, 2]
    np.testing.assert_array_equal(history["reward/mean"], [0.25, 0.5])
    np.testing.assert_array_equal(history["policy/loss"], [np.nan, 3.0])
    np.testing.assert_array_equal(history["kl/mean"], [np.nan, 0.125])
    np.testing.assert_array_equal(history["unknown"], [np.nan, np.nan])
    np.testing.assert_array_equal(history.finite("policy/loss"), [3.0])
    assert set(history.columns) == {"reward/mean", "policy/loss", "kl/mean"}
    assert history.nonfinite == {"policy/loss": [1]}
    assert history.unreadable == []


def test_partial_lines_are_dropped_and_listed(tmp_path):
    path = write_lines(
        tmp_path / "metrics.jsonl", {"step": 1, "a": 1.0}, '{"step": 2, "a', {"step": 3, "a": 3.0}, '{"step": 4'
    )
    history = read_history(path)
    assert history.steps.tolist() == [1, 3]
    assert history["a"].tolist() == [1.0, 3.0]
    assert history.unreadable == [2, 4]


def test_invalid_utf8_is_an_unreadable_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2\xc3')
    assert read_history(path).unreadable == [2]


def test_last_line_of_a_repeated_step_counts(tmp_path):
    lines = [{"step": step, "a": value} for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0))]
    history = read_history(write_lines(tmp_path / "metrics.jsonl", *lines))
    assert history.steps.tolist() == [1, 2, 3]
    assert history["a"].tolist() == [1.0, 20.0, 3.0]


def test_nan_literals_become_nan(tmp_path):
    history = read_history(write_lines(tmp_path / "metrics.jsonl", '{"step": 1, "a": NaN, "b": Infinity}'))
    assert np.isnan([history["a"][0], history["b"][0]]).all()


def test_missing_file_has_no_steps(tmp_path):
    history = read_history(tmp_path / "metrics.jsonl")
    assert history.steps.tolist() == []
    assert history["reward/mean"].tolist() == []
