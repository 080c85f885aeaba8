"""The environment variables that vLLM reads at import, so they are set before the engine's process imports it."""

from __future__ import annotations

import os

ENDS_WITH_PARENT = "MEGARL_ENDS_WITH_PARENT"
"""The variable by which a rank knows that nobody else would end it when the process is lost that has started it: it
waits for calls from another node."""


def environment(
    ranks: int, threads: int, index: int, on_gpu: bool = False, batch_invariant: bool = False
) -> dict[str, str]:
    """Returns the environment of an engine's process. A GPU engine ignores the variables for CPU.

    ranks             ranks that it starts
    threads           CPU threads of one of them
    index             the engine's number among those of its kind
    batch_invariant   whether its kernels add up in an order that does not depend on what else is in the batch
    """
    # On CPU vLLM calls one function compiled, which counts tokens: it would begin with a C++ compiler's seconds.
    # With scales that are powers of two, its default for DeepGEMM, vLLM would quantise a second time what comes in fp8
    # blocks: an error of 3.7 % of the weights instead of 2.6 %, and memory would not be what a refit writes.
    own = {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if on_gpu else {"TORCH_COMPILE_DISABLE": "1"}
    own |= {"VLLM_BATCH_INVARIANT": "1"} if batch_invariant else {}
    return own | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == 1 else _binding(ranks, threads, index),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _binding(ranks: int, threads: int, index: int) -> str:
    """Returns each rank's cores, as many as it has threads: vLLM gives it a thread for each. The ranks of all engines
    take cores in turn, and begin again with the first where there are no more."""
    cores = sorted(os.sched_getaffinity(0))
    size = min(threads, len(cores))
    starts = [(index * ranks + rank) * size for rank in range(ranks)]
    return "|".join(",".join(str(cores[(start + i) % len(cores)]) for i in range(size)) for start in starts)
