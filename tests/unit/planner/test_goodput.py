"""Tests of the predicted goodput of runs whose devices fail."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import factorial
from pathlib import Path

import pytest

from megarl.planner.goodput import FailureModel, erlang_b, predict_goodput, simulate_goodput
from tools.benchmarks import figures, goodput

LLAMA_3 = 419 / (54 * 24 * 16384)
MODEL = FailureModel(1024, LLAMA_3, detect_s=15, restart_s=60, interval_s=60, copy_s=0.1, spares=2)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, devices=16384, spares=0, interval_s=1800, restart_s=300)])
def test_shares_add_up_to_the_allocation(model: FailureModel) -> None:
    for shares in (predict_goodput(model), simulate_goodput(model, failures=500)):
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share >= 0 for share in shares.values())


def test_prediction_equals_its_first_order() -> None:
    """For rare failures, the losses add up: copies, half an interval, detection, restart, and the wait for a node."""
    model = replace(MODEL, spares=0, rate=LLAMA_3 / 100, copy_s=0.6)
    shares, failures = predict_goodput(model), model.failures_per_s
    lost = 0.6 / 60.6 + failures * (60.6 / 2 + 15 + 60 + 0.7 * 1800)
    assert shares["kept"] == pytest.approx(1 - lost, abs=1e-5)
    assert shares["queue"] == pytest.approx(failures * 0.7 * 1800, rel=0.01)


def test_spare_nodes_cost_their_share() -> None:
    assert predict_goodput(MODEL)["spare"] == pytest.approx(16 / 1040)


def test_erlang_b_equals_its_sum() -> None:
    for load, servers in product((0.1, 1.0, 7.5), (0, 1, 4, 10)):
        terms = [load**n / factorial(n) for n in range(servers + 1)]
        assert erlang_b(load, servers) == pytest.approx(terms[-1] / sum(terms))


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 0.001),
        ({"spares": 0}, 0.002),
        ({"interval_s": 1800, "restart_s": 300, "copy_s": 2}, 0.002),
        ({"devices": 16384}, 0.015),
        ({"devices": 16384, "spares": 8, "interval_s": 600}, 0.01),
    ],
)
def test_simulation_agrees_with_the_prediction(changes: dict[str, float], tolerance: float) -> None:
    model = replace(MODEL, **changes)
    predicted, simulated = predict_goodput(model), simulate_goodput(model)
    assert predicted == pytest.approx(simulated, abs=tolerance)


def test_simulation_is_deterministic() -> None:
    assert simulate_goodput(MODEL, 300) == simulate_goodput(MODEL, 300) != simulate_goodput(MODEL, 300, seed=1)


def test_recorded_goodput_is_current() -> None:
    """`python tools/benchmarks/goodput.py --run RUN --out …` updates the record."""
    recorded = figures.result("goodput")
    found = json.loads(json.dumps(goodput.figures(recorded["measured_restart"])))
    assert found == {name: recorded[name] for name in found}
    assert recorded["largest_difference"] < goodput.TOLERANCE


def test_recorded_goodput_reaches_its_target() -> None:
    for recovery in figures.result("goodput")["recoveries"].values():
        assert recovery["by_size"]["Llama 3"][str(goodput.GPUS)]["simulated"] >= goodput.TARGET


def test_largest_factor_is_at_the_target() -> None:
    [model, _] = goodput.models({"engines": 30.0}).values()
    for field in ("rate", "interval_s", "copy_s"):
        factor = goodput.most(model, field)
        for scale, reaches in ((0.97, True), (1.03, False)):
            changed = goodput.with_best_spares(goodput.scaled(model, field, factor * scale))
            assert (predict_goodput(changed)["kept"] >= goodput.TARGET) == reaches


def test_restart_is_measured_from_the_ledger(tmp_path: Path) -> None:
    outcomes = [("", 100.0, 3.0), ("ended", 200.0, 5.0), ("", 300.0, 90.0), ("ended", 400.0, 7.0)]
    for number, (outcome, begin, seconds) in enumerate(outcomes, start=1):
        (logs := tmp_path / "logs" / f"attempt_{number}").mkdir(parents=True)
        start = {"begin": begin, "after_step": 0, "devices": 2, "nodes": 1, "job": "", "restart": 0, "allocated": 0.0}
        rows = [start, {"begin": begin, "end": begin + seconds, "seconds": {"startup/ray": 2 * seconds}}]
        rows.append({"begin": begin + seconds, "end": begin + 95, "seconds": {"finish": 1.0}, "outcome": outcome})
        (logs / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert goodput.measured_restart(tmp_path) == {"ray": 6.0}
