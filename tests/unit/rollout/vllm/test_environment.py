"""Environment variables of engine processes, such as the cores of CPU ranks."""

from __future__ import annotations

import os

import pytest
from vllm import envs

from megarl.rollout.vllm.environment import environment


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch):
    """cores(numbers) sets the cores that this process may use."""
    return lambda numbers: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers))


def binding(tp: int, threads: int, index: int) -> str:
    """Return the cores in vLLM's format: ranks are separated by |, cores by commas."""
    return environment(tp, threads, index)["VLLM_CPU_OMP_THREADS_BIND"]


def test_engines_use_disjoint_cores(cores) -> None:
    cores(range(16))
    assert [binding(2, 2, index) for index in range(4)] == ["0,1|2,3", "4,5|6,7", "8,9|10,11", "12,13|14,15"]


def test_ranks_have_one_core_per_thread(cores) -> None:
    cores(range(16))
    assert binding(2, 4, 0) == "0,1,2,3|4,5,6,7"
    assert binding(4, 1, 1) == "4|5|6|7"


def test_cores_are_reused_when_exhausted(cores) -> None:
    cores([3, 5])
    assert [binding(2, 1, index) for index in range(2)] == ["3|5", "3|5"]
    cores([3, 5, 7])
    assert binding(2, 2, 0) == "3,5|7,3"


def test_rank_uses_each_core_once(cores) -> None:
    cores([3, 5])
    assert binding(2, 8, 0) == "3,5|3,5"


def test_deep_gemm_scale_rounding_is_disabled_on_gpus(cores) -> None:
    cores(range(4))
    assert environment(1, 4, 0, on_gpu=True)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


def test_batch_invariant_mode_is_set_only_on_request(cores, monkeypatch) -> None:
    cores(range(4))
    for is_invariant in (False, True):
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        for name, value in environment(1, 4, 0, on_gpu=True, batch_invariant=is_invariant).items():
            monkeypatch.setenv(name, value)
        assert envs.VLLM_BATCH_INVARIANT is is_invariant


def test_single_rank_engine_is_not_bound_to_cores(cores) -> None:
    cores(range(16))
    variables = environment(1, 4, 3)
    assert (variables["VLLM_CPU_OMP_THREADS_BIND"], variables["OMP_NUM_THREADS"]) == ("nobind", "4")
