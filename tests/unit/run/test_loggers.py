import io
import json
import math

import pytest

from megarl.run.loggers import HEADER_EVERY, ConsoleSink, JsonlSink, duration

STEP = {
    "reward/mean": 0.1234,
    "reward/std": 0.3333,
    "response/length_mean": 7.21,
    "response/truncated_frac": 0.12,
    "policy/entropy": 0.8124,
    "policy/grad_norm": 12.3456,
    "mismatch/logprob_abs_mean": 1.2e-6,
    "throughput/tokens_per_second": 512.4,
    "time/rollout": 12.1,
    "time/train": 18.0,
    "time/refit": 0.4,
    "time/step": 31.0,
    "memory/peak_rss_gb": 9.5,
    "memory/peak_pss_gb": 6.92,
}


def strict_json(line: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def console_lines(*steps: tuple[int, dict], total: int = 14) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(total, stream)
    for step, metrics in steps:
        sink.write(step, metrics)
    return stream.getvalue().splitlines()


def test_console_has_other_columns_for_offline_data():
    stream = io.StringIO()
    sink = ConsoleSink(3, stream, is_offline=True)
    sink.write(1, {"preference/loss": 0.6931, "reward_model/grad_norm": 1.5, "preference/accuracy": 0.75})
    sink.write(2, {"preference/loss": 0.5, "data/trained_tokens": 12345})
    header, first, second = (line.split() for line in stream.getvalue().splitlines())
    assert header == ["step", "ETA", "loss", "accuracy", "|grad|"]
    assert first == ["1/3", "–", "0.6931", "75%", "1.5"]
    assert second == ["2/3", "–", "0.5000", "–", "–"]


def test_console_counts_images():
    stream = io.StringIO()
    ConsoleSink(3, stream, has_images=True).write(1, {"throughput/images_per_second": 2.5, "policy/entropy": 1.25})
    header, line = (text.split() for text in stream.getvalue().splitlines())
    assert dict(zip(header, line, strict=True))["img/s"] == "2.50"
    assert not {"length", "cut", "tok/s"}.intersection(header)


def test_console_shows_only_the_columns_of_a_fine_tuning_run():
    stream = io.StringIO()
    metrics = {"policy/nll": 2.5, "policy/entropy": 1.25, "policy/grad_norm": 0.5, "data/trained_tokens": 12345}
    ConsoleSink(3, stream, is_offline=True).write(1, metrics | {"time/step": 21.0})
    header, line = (line.split() for line in stream.getvalue().splitlines())
    assert header == ["step", "ETA", "loss", "entropy", "|grad|", "tokens"]
    assert line == ["1/3", "42s", "2.5000", "1.250", "0.5", "12,345"]


def test_jsonl_is_valid_after_every_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2):
        sink.write(step, {"reward/mean": step / 10, "weights/version": step})
        lines = path.read_text().splitlines()
        assert len(lines) == step
        assert strict_json(lines[-1]) == {"step": step, "reward/mean": step / 10, "weights/version": step}
        assert next(iter(strict_json(lines[-1]))) == "step"


def test_jsonl_appends_to_an_existing_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        JsonlSink(path).write(step, {})
    assert [strict_json(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_jsonl_writes_nonfinite_values_as_null(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    JsonlSink(path).write(1, {"policy/loss": value, "reward/mean": 0.5})
    expected = {"step": 1, "policy/loss": None, "reward/mean": 0.5, "nonfinite": ["policy/loss"]}
    assert strict_json(path.read_text()) == expected


def test_console_shows_all_columns():
    header, line = console_lines((3, STEP))
    shown = ["3/14", "5m41s", "0.123±0.333", "7.2", "12%", "0.812", "12.3", "1.2e-06", "512"]
    assert line.split() == [*shown, "12.1s", "18.0s", "0.4s", "6.92GB"]
    assert len(header.split()) == len(line.split())
    assert header.split()[:3] == ["step", "ETA", "reward±std"]


def test_console_fits_100_columns_and_has_no_control_characters():
    wide = STEP | {
        "reward/mean": -0.5,
        "policy/grad_norm": 0.00123,
        "throughput/tokens_per_second": 123456.0,
        "time/rollout": 1234.5,
        "time/train": 1234.5,
    }
    for line in console_lines((1, STEP), (14, wide)):
        assert len(line) <= 100
        assert line.isprintable()


def test_console_shows_a_dash_for_missing_metrics():
    without = {name: value for name, value in STEP.items() if name not in ("policy/entropy", "time/step")}
    cells = console_lines((1, without))[1].split()
    assert cells[1] == "–"  # the ETA needs a previous step
    assert cells[5] == "–"
    assert cells.count("–") == 2
    assert console_lines((1, {}))[1].split() == ["1/14", *["–"] * 12]


def test_console_prefers_pss_and_falls_back_to_rss():
    rss_only = {name: value for name, value in STEP.items() if name != "memory/peak_pss_gb"}
    assert console_lines((1, STEP))[1].endswith("6.92GB")
    assert console_lines((1, rss_only))[1].endswith("9.50GB")


def test_eta_uses_the_latest_steps():
    """The two slow first steps leave the window of ten steps."""
    steps = [(step, {"time/step": 100.0 if step <= 2 else 1.0}) for step in range(1, 13)]
    lines = console_lines(*steps, total=22)
    assert lines[1].split()[1] == "35m00s"
    assert lines[-1].split()[1] == "10s"


def test_header_is_repeated():
    lines = console_lines(*[(step, STEP) for step in range(1, HEADER_EVERY + 2)])
    assert [index for index, line in enumerate(lines) if "reward±std" in line] == [0, HEADER_EVERY + 1]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (307, "5m07s"),
        (3599.9, "1h00m"),
        (12000, "3h20m"),
        (187200, "2d04h"),
        (math.nan, "–"),
    ],
)
def test_duration_is_formatted_compactly(seconds, shown):
    assert duration(seconds) == shown
