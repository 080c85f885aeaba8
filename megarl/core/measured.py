"""Measured constants that the planner uses, each with its source and date. tools/gpu measures them again."""

from __future__ import annotations

from dataclasses import dataclass

H100 = "one H100 80GB, torch 2.11, CUDA 13.0: tools/benchmarks/results/h100.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured quantity. `meaning` and `unit` describe the value; `date` is when it was measured."""

    value: float
    unit: str
    meaning: str
    source: str
    date: str


CUDA_CONTEXT = Measured(
    554_500_096, "bytes", "a process's CUDA context before its first computation", H100, "2026-11-27"
)
FIRST_COMMUNICATOR = Measured(
    685_768_704,
    "bytes",
    "a process's first NCCL communicator, even with one rank, and NCCL's kernels",
    H100,
    "2026-11-27",
)
TRAINER_KERNELS = Measured(
    973_144_064,
    "bytes",
    "other memory that an update allocates outside torch: loaded kernels, and the workspaces of cuBLAS and cuDNN",
    H100,
    "2026-11-27",
)
FRAGMENTS = Measured(
    926_511_104,
    "bytes",
    "memory that torch's allocator reserves beyond the tensors at the peak of an update; 0.5 and 0.6 GB in other cases",
    H100,
    "2026-11-27",
)
DENSE_SHARE = Measured(
    0.51,
    "fraction",
    "of the nominal throughput, achieved by an update's matrix products and attention, without the optimizer, for "
    "layers of an 8B model. Layers of a 1.5B model reach 0.38, because the GPU waits for the host",
    H100,
    "2026-11-27",
)
OPTIMIZER_SHARE = Measured(
    0.35,
    "fraction",
    "of the nominal memory bandwidth, achieved by Adam's step, at 30 bytes per parameter, for 2.3B parameters; 0.31 "
    "for 1.5B",
    H100,
    "2026-11-27",
)
HOST_LINK_SHARE = Measured(
    0.74, "fraction", "of the nominal bandwidth to host memory, achieved when states are offloaded", H100, "2026-11-27"
)
