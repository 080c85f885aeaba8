"""Environment variables that vLLM reads at import, so they are set before the engine's process imports it."""

from __future__ import annotations

import os


def environment(tp: int, threads: int) -> dict[str, str]:
    """tp: ranks of the engine; threads: CPU threads of one of them. A GPU engine ignores the CPU ones."""
    cores = sorted(os.sched_getaffinity(0))
    binding = "nobind" if tp == 1 else "|".join(str(core) for core in cores[:tp])
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
