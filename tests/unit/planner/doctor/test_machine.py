"""Checks of the machine, on files in the kernel's format and temporary folders."""

from __future__ import annotations

import resource
import socket

import pytest

from megarl.planner.doctor import machine
from megarl.planner.doctor.machine import (
    GIB,
    can_listen,
    cgroup_bytes,
    check_machine,
    disk,
    locked_memory,
    memory,
    open_files,
    ports,
    processors,
    shared_memory,
)


def test_quota_below_the_core_count_is_a_note():
    finding = processors(allowed=64, quota=8.0, installed=128)
    assert (finding.state, finding.found) == ("note", "cgroup quota of 8 cores (64 of 128 cores allowed)")
    assert "at most 8 in total" in finding.fix
    assert processors(64, None, 128).found == "64 of 128"
    assert processors(64, 80.0, 64).found == "64"


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), (f"{GIB}\n", GIB), (None, None)])
def test_cgroup_memory_limit_is_a_note(tmp_path, text, limit):
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert cgroup_bytes(tmp_path) == limit
    assert memory(4 * GIB, limit).state == ("ok" if limit is None else "note")


def test_missing_or_small_shared_memory_is_a_problem(tmp_path, monkeypatch):
    assert shared_memory(tmp_path / "none").state == "problem"
    assert shared_memory(tmp_path).state == "ok"
    monkeypatch.setattr(machine, "MIN_SHARED_GIB", 10**9)
    assert shared_memory(tmp_path).state == "problem"


def test_disk_of_a_missing_folder_is_that_of_its_parent(tmp_path, monkeypatch):
    finding = disk("disk of runs", tmp_path / "a" / "b")
    assert finding.state == "ok" and str(tmp_path) in finding.found
    monkeypatch.setattr(machine, "MIN_DISK_GIB", 10**9)
    assert disk("disk of runs", tmp_path).state == "note"


def test_unwritable_disk_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    finding = disk("disk of runs", tmp_path)
    assert finding.state == "problem" and "run.folder" in finding.fix


@pytest.mark.parametrize(("local_range", "state"), [("32768\t60999\n", "ok"), ("32768\t33000\n", "note"), ("", "ok")])
def test_small_port_range_is_a_note(local_range, state):
    assert ports(local_range, True).state == state


def test_forbidden_listening_is_a_problem(monkeypatch):
    assert can_listen()

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert not can_listen()
    assert ports("32768 60999", False).state == "problem"


@pytest.mark.parametrize(
    ("soft", "hard", "state", "fix"),
    [
        (65536, 65536, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
        (1024, 1048576, "note", "ulimit -n 65536"),
        (1024, 4096, "note", "raise nofile in /etc/security/limits.conf to 65536"),
    ],
)
def test_low_open_file_limit_is_a_note_with_fix(soft, hard, state, fix):
    finding = open_files(soft, hard)
    assert (finding.state, finding.fix) == (state, fix)


def test_low_locked_memory_limit_is_a_note():
    assert locked_memory(resource.RLIM_INFINITY).state == "ok"
    assert locked_memory(65536).state == "note"


def test_all_resources_of_this_machine_are_checked(tmp_path):
    names = [finding.name for finding in check_machine(tmp_path)]
    assert names == [
        *("processors", "memory", "shared memory", "disk of runs", "temporary files", "ports", "open files"),
        "locked memory",
    ]
