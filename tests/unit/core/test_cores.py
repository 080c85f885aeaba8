"""Usable CPU cores, from the process's affinity mask and cgroup quota."""

from __future__ import annotations

import os

import pytest

from megarl.core.cores import cgroup_cores, usable_cores


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        # A job step's cgroup lies inside the job's, whose quota also applies.
        ("0::/job_7/step_0\n", {"job_7/cpu.max": "800000 100000", "job_7/step_0/cpu.max": "max 100000"}, 8),
        ("0::/job_7/step_0\n", {"job_7/cpu.max": "800000 100000", "job_7/step_0/cpu.max": "400000 100000"}, 4),
        # In a container, the path is the one on the host, but the root is the container's own cgroup.
        ("0::/docker/abc\n", {"cpu.max": "300000 100000"}, 3),
        # Version 1, with one folder per set of controllers. Only the CPU controller's quota counts.
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            2,
        ),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_cgroup_cores_is_the_lowest_quota(tmp_path, groups, files, cores):
    write(tmp_path / "proc", {"self/cgroup": groups})
    write(tmp_path / "cgroup", files)
    (tmp_path / "cgroup").mkdir(exist_ok=True)
    assert cgroup_cores(tmp_path / "proc", tmp_path / "cgroup") == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 6), (2.5, 2), (0.5, 1), (64.0, 6)])
def test_usable_cores_is_the_lower_of_affinity_and_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr("megarl.core.cores.cgroup_cores", lambda: quota)
    assert usable_cores() == cores
