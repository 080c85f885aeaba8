"""The cores on which the ranks of an engine on CPU run."""

from __future__ import annotations

import os

import pytest
from vllm import envs

from megarl.rollout.vllm.environment import environment


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch):
    """cores(numbers): those that this process may run on."""
    return lambda numbers: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers))


def binding(tp: int, threads: int, index: int) -> str:
    """Returns the cores as vLLM reads them: ranks apart by |, their cores by commas."""
    return environment(tp, threads, index)["VLLM_CPU_OMP_THREADS_BIND"]


def test_engines_share_the_cores_out(cores) -> None:
    cores(range(16))
    assert [binding(2, 2, index) for index in range(4)] == ["0,1|2,3", "4,5|6,7", "8,9|10,11", "12,13|14,15"]


def test_ranks_have_the_cores_that_their_threads_ask_for(cores) -> None:
    cores(range(16))
    assert binding(2, 4, 0) == "0,1,2,3|4,5,6,7"
    assert binding(4, 1, 1) == "4|5|6|7"


def test_engines_begin_again_where_there_are_no_more_cores(cores) -> None:
    cores([3, 5])
    assert [binding(2, 1, index) for index in range(2)] == ["3|5", "3|5"]
    cores([3, 5, 7])
    assert binding(2, 2, 0) == "3,5|7,3"


def test_a_rank_has_no_core_twice(cores) -> None:
    cores([3, 5])
    assert binding(2, 8, 0) == "3,5|3,5"


def test_fp8_blocks_stay_as_they_came_on_gpus(cores) -> None:
    cores(range(4))
    assert environment(1, 4, 0, on_gpu=True)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


def test_only_an_engine_that_is_to_be_batch_invariant_is_told_so(cores, monkeypatch) -> None:
    cores(range(4))
    for is_invariant in (False, True):
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        for name, value in environment(1, 4, 0, on_gpu=True, batch_invariant=is_invariant).items():
            monkeypatch.setenv(name, value)
        assert envs.VLLM_BATCH_INVARIANT is is_invariant


def test_an_engine_of_one_rank_is_left_to_the_system(cores) -> None:
    cores(range(16))
    own = environment(1, 4, 3)
    assert (own["VLLM_CPU_OMP_THREADS_BIND"], own["OMP_NUM_THREADS"]) == ("nobind", "4")
