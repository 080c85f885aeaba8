"""A run survives more than fifty faults of all kinds on a Slurm cluster of three nodes.

`tools/benchmarks/soak.py` runs the same soak and records its figures.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.slurm import slurm
from tests.cluster.soak import AFTER, FAULTS, SPACING, Occurred, Soak, lost_time, plan

SEED = 34


def test_plan_follows_from_the_seed_and_spaces_faults() -> None:
    faults = plan(SEED)
    assert faults == plan(SEED) != plan(SEED + 1)
    assert Counter(fault.kind for fault in faults) == FAULTS and len(faults) >= 50
    steps = [fault.step for fault in faults]
    assert all(later - earlier >= AFTER for earlier, later in pairwise(steps))
    assert {step % SPACING for step in steps} == {*range(SPACING - AFTER)}


def write_times(run: Path, attempt: int, begin: float, after_step: int, *rows: tuple[float, int | None]) -> None:
    """Write an attempt's records of time. Each row has its length and its step."""
    start = {"begin": begin, "after_step": after_step, "devices": 4, "nodes": 2, "job": "", "restart": 0}
    lines: list[dict] = [{**start, "allocated": 0.0}]
    for length, step in rows:
        seconds = {"startup/ray" if step is None else "train": 4 * length}
        lines.append({"begin": begin, "end": begin + length, "seconds": seconds} | ({"step": step} if step else {}))
        begin += length
    folder = run / f"logs/attempt_{attempt}"
    folder.mkdir(parents=True)
    (folder / "time.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lost_time_is_the_delay_of_the_next_steps(tmp_path: Path) -> None:
    """Steps take 10 s. The first fault ends an attempt 2 s after step 4. The next attempt resumes after step 3 and ends
    step 7 at 220, which is 80 s instead of 30 s after the end of step 4. After the second fault, step 12 takes 20 s.
    """
    write_times(tmp_path, 1, 100, 0, *((10, step) for step in range(1, 5)))
    write_times(tmp_path, 2, 150, 3, (30, None), *((10, step) for step in range(4, 12)), (20, 12), (10, 13))
    faults = [
        Occurred("kill", 4, "n0", 142.0),
        Occurred("stop", 9, "n0", 241.0),
        Occurred("kill", 11, "n0", 262.0),
    ]
    figures = lost_time(tmp_path, faults[:2])
    assert figures["step_s"] == 10
    kill = {"number": 1, "ended_attempts": 1, "median_s": 50.0, "longest_s": 50.0}
    stop = {"number": 1, "ended_attempts": 0, "median_s": 10.0, "longest_s": 10.0}
    assert figures["kinds"] == {"kill": kill, "stop": stop}
    with pytest.raises(StopIteration):
        lost_time(tmp_path, faults)  # fewer than three steps follow the last fault


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_run_survives_all_kinds_of_faults(shared: Path) -> None:
    print(f"seed: {SEED}", flush=True)
    (shared / "slow").unlink()
    with slurm(3, shared) as cluster:
        soak = Soak(cluster, shared, SEED, plan(SEED), vllm=False)
        soak.inject()
        figures = soak.figures(SEED)
    assert figures["minutes"] >= 30
    assert abs(figures["ledger_difference"]) < 0.005 and figures["ledger"].get("unexplained", 0.0) < 0.005
    assert sum(kind["number"] for kind in figures["kinds"].values()) == sum(FAULTS.values())
