"""Environment variables that vLLM reads on import. Set them before the engine's process imports vLLM."""

from __future__ import annotations

import os

ENDS_WITH_PARENT = "MEGARL_ENDS_WITH_PARENT"
"""If set, a rank exits with its parent. An engine cannot stop its ranks on other nodes, so these ranks need it."""


def environment(
    ranks: int, threads: int, index: int, on_gpu: bool = False, batch_invariant: bool = False
) -> dict[str, str]:
    """Return the environment variables for an engine's process. GPU engines ignore the CPU variables. The process
    starts `ranks` ranks with `threads` threads each, and `index` is the engine's index among those of its kind. With
    `batch_invariant`, kernels sum in an order that does not depend on the batch."""
    # On CPU, vLLM compiles a function that counts tokens, and the C++ compiler would add seconds to startup.
    # On GPU, vLLM by default rounds DeepGEMM's scales to powers of two. This would requantize fp8 blocks (an error of
    # 3.7 % instead of 2.6 % in the weights), and parameters would no longer equal the values that a refit writes.
    variables = {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if on_gpu else {"TORCH_COMPILE_DISABLE": "1"}
    variables |= {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    return variables | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == 1 else _binding(ranks, threads, index),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _binding(ranks: int, threads: int, index: int) -> str:
    """Return the CPU cores of each rank in vLLM's format, with one core per thread. The ranks of all engines get
    consecutive cores; the assignment wraps around after the last core."""
    cores = sorted(os.sched_getaffinity(0))
    size = min(threads, len(cores))
    starts = [(index * ranks + rank) * size for rank in range(ranks)]
    return "|".join(",".join(str(cores[(start + i) % len(cores)]) for i in range(size)) for start in starts)
