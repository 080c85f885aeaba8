"""Checks of GPUs, on recorded output of nvidia-smi."""

from __future__ import annotations

import pytest

from megarl.planner.doctor.gpus import QUERY, TOPOLOGY, check_gpus, driver, links, run_command

H100 = "NVIDIA H100 80GB HBM3, 81559, 580.82.07\n"
TWO = """\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPIX\t0-47\t0\tN/A
GPU1\tNV18\t X \tSYS\t48-95\t1\tN/A
NIC0\tPIX\tSYS\t X \t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def outputs(query: str | None, topology: str | None = None):
    return lambda command: {QUERY: query, TOPOLOGY: topology}[tuple(command)]


@pytest.mark.parametrize("output", [None, "", "\n"])
def test_no_gpus_is_a_note(output):
    [finding] = check_gpus("2.13.0+cpu", None, outputs(output))
    assert (finding.state, finding.found) == ("note", "none, so runs use the CPU")


def test_eight_gpus_are_counted_with_their_driver():
    found = check_gpus("2.13.0+cu130", "13.0.96", outputs(8 * H100, None))
    assert [each.found for each in found[:2]] == ["8 × NVIDIA H100 80GB HBM3, 80 GiB", "580.82.07"]
    assert [each.state for each in found] == ["ok", "ok", "note"]


def test_one_gpu_has_no_links_finding():
    assert [each.name for each in check_gpus("2.13.0+cu130", "13.0.96", outputs(H100))] == ["GPUs", "driver"]


@pytest.mark.parametrize(
    ("found", "torch", "runtime", "state"),
    [
        ("580.65.06", "2.13.0+cu130", None, "ok"),
        ("575.51.03", "2.13.0+cu130", None, "problem"),
        ("535.161.08", "2.11.0+cu128", "12.8.90", "ok"),
        ("470.82.01", "2.11.0+cu128", "12.8.90", "problem"),
        ("580.65.06", "2.13.0+cpu", None, "problem"),
        ("580.65.06", "2.13.0", "13.0.96", "ok"),
        ("575.51.03", "2.13.0", "13.0.96", "problem"),
        ("535.161.08", "2.11.0", "12.8.90", "ok"),
        ("580.65.06", "2.13.0", None, "ok"),
        ("580.65.06", None, None, "ok"),
    ],
)
def test_driver_is_compared_with_torchs_cuda(found, torch, runtime, state):
    finding = driver(found, torch, runtime)
    assert finding.state == state
    assert bool(finding.fix) == (state == "problem")


def test_links_between_all_pairs_are_ok():
    assert links(2, TWO).found == "NVLink between all 2 GPUs"


def test_links_between_some_pairs_are_a_note():
    rows = ["GPU0 X NV4 SYS SYS", "GPU1 NV4 X SYS SYS", "GPU2 SYS SYS X NV4", "GPU3 SYS SYS NV4 X"]
    finding = links(4, "\n".join(rows))
    assert (finding.state, finding.found) == ("note", "NVLink between 2 of 6 pairs of GPUs")


def test_missing_failing_or_hanging_command_returns_none(monkeypatch):
    assert run_command(["no-such-command-here"]) is None
    assert run_command(["false"]) is None
    monkeypatch.setattr("megarl.planner.doctor.gpus.TIMEOUT_S", 0.05)
    assert run_command(["sleep", "5"]) is None
    assert run_command(["echo", "here"]) == "here\n"
