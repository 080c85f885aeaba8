"""Nominal specifications of GPUs and their links, and the fractions of these that runs achieve."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from megarl.core import measured
from megarl.core.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in its standard eight-GPU server, with the manufacturer's specifications.

    Link bandwidths are per direction, in GB/s.

    Attributes:
        memory_gib: memory available to processes, as reported by the driver (excludes ECC and firmware).
        tflops: dense bfloat16 throughput in TFLOP/s.
        nvlink_gb_s: bandwidth to the other GPUs in the server.
        network_gb_s: bandwidth to other servers, which is this GPU's share of the server's network cards.
        host_gb_s: bandwidth to host memory over PCIe.
        host_gib: this GPU's share of the server's host memory.
    """

    memory_gib: float
    tflops: float
    memory_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float
    host_gb_s: float
    host_gib: float
    source: str


GPUS: dict[str, Gpu] = {
    "A100-80GB": Gpu(79.2, 312, 2039, 300, 25, 32, 256, "A100 SXM datasheet; DGX A100 (8 x 200 Gb/s, 2 TB)"),
    "H100-80GB": Gpu(79.6, 989.5, 3350, 450, 50, 64, 256, "H100 SXM datasheet; DGX H100 (8 x 400 Gb/s, 2 TB)"),
    "H200-141GB": Gpu(140.4, 989.5, 4800, 450, 50, 64, 256, "H200 SXM datasheet; DGX H200 (8 x 400 Gb/s, 2 TB)"),
    "H800-80GB": Gpu(
        79.6, 989.5, 3350, 200, 50, 64, 256, "as H100, but 400 GB/s over NVLink in both directions together"
    ),
    "H20-96GB": Gpu(
        95.6, 148, 4000, 450, 50, 64, 256, "specifications by vendors of HGX H20 (NVIDIA has no public datasheet)"
    ),
    "B200-180GB": Gpu(179.1, 2250, 7700, 900, 50, 64, 512, "DGX B200 datasheet (1.44 TB of GPU memory, 62 TB/s, 4 TB)"),
}
"""Maps each GPU name that --gpus accepts to its specifications."""

DENSE_SHARE = measured.DENSE_SHARE.value
"""Fraction of a GPU's nominal throughput that dense layers achieve. It excludes time spent waiting for other ranks,
which is modeled separately. Megatron-LM reports up to 47 % for full training steps on H100, including waiting."""

EXPERT_SHARE = 0.48
EXPERT_ROWS = 256
"""An expert that processes r rows on a rank achieves the fraction EXPERT_SHARE · r / (r + EXPERT_ROWS) of the nominal
throughput, because its matrix products are small. The formula and EXPERT_ROWS are assumptions. With 14,336 rows, the
formula gives the 468 TFLOP/s (47 %) that Megatron-core reports for Mixtral 8x7B."""

MEMORY_SHARE = 0.7
"""Fraction of the nominal memory bandwidth that an engine step achieves. This value is an assumption."""

LINK_SHARE = 0.75
"""Fraction of a link's nominal bandwidth that collectives with large messages achieve. This value is an assumption."""

OPTIMIZER_SHARE, HOST_LINK_SHARE = measured.OPTIMIZER_SHARE.value, measured.HOST_LINK_SHARE.value
"""Fractions of the nominal bandwidths to GPU memory and to host memory that the optimizer and offloading achieve."""

STORAGE_GB_S = 4
"""Write bandwidth of each node to the shared file system while all nodes write, in GB/s. This value is an
assumption."""


HEADROOM = 0.08
"""Default fraction of each GPU's memory that a search for layouts leaves free for estimation errors and for memory that
the estimates do not cover."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs for a run. Nodes are filled one after another.

    Attributes:
        headroom: fraction of each GPU's memory to leave free.
    """

    name: str
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8
    headroom: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes that a plan may use on each GPU."""
        return self.gpu.memory_gib * GIB * (1 - self.headroom)

    def describe_memory(self) -> str:
        """Describe the memory that a plan may use on each GPU."""
        if not self.headroom:
            return f"{self.gpu.memory_gib:g} GiB"
        return f"{self.memory_bytes / GIB:.1f} of {self.gpu.memory_gib:g} GiB (--headroom {self.headroom:g})"

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    def link_bytes_per_second(self, ranks: int, stride: int = 1) -> float:
        """Return the bandwidth of each rank in a process group, in bytes per second. A ring over several nodes leaves
        each node once and uses the network cards of all its ranks on that node. stride: distance between neighboring
        ranks of the group."""
        if ranks * stride <= self.gpus_per_node:
            return LINK_SHARE * 1e9 * self.gpu.nvlink_gb_s
        members = max(1, self.gpus_per_node // stride)
        return LINK_SHARE * 1e9 * min(self.gpu.nvlink_gb_s, self.gpu.network_gb_s * members)

    def describe(self) -> str:
        gpu = self.gpu
        return (
            f"{self.num_gpus} x {self.name} on {self.num_nodes} {'node' if self.num_nodes == 1 else 'nodes'}, each GPU "
            f"with {gpu.memory_gib:g} GiB, {gpu.tflops:g} TFLOP/s, {gpu.memory_gb_s:,} GB/s to its memory, "
            f"{gpu.nvlink_gb_s} GB/s inside the node, {gpu.network_gb_s:g} GB/s to other nodes"
        )


def headroom_of(headroom: float | None, keeps_layout: bool) -> float:
    """Return the headroom, or its default: HEADROOM for a search, and 0 for a recipe's own layout."""
    return headroom if headroom is not None else 0.0 if keeps_layout else HEADROOM


def read_cluster(text: str, gpus_per_node: int = 8, headroom: float = 0.0) -> Cluster:
    """Parse a cluster description such as "64xH100-80GB". Raise a UserError if the description is malformed or names an
    unknown GPU, or a number is out of range."""
    match = re.fullmatch(r"([1-9]\d*)\s*[xX]\s*(\S+)", text)
    if match is None:
        raise UserError(f"--gpus {text}: expected a GPU count and type. Fix: use a form such as 64xH100-80GB")
    if gpus_per_node < 1:
        raise UserError(f"--nodes-of {gpus_per_node}: expected at least one GPU per node. Fix: use 1 or more")
    if not 0 <= headroom < 1:
        raise UserError(
            f"--headroom {headroom:g}: expected a fraction of at least 0 and below 1. Fix: use {HEADROOM:g}"
        )
    names = {name.lower(): name for name in GPUS} | {name.split("-")[0].lower(): name for name in GPUS}
    name = names.get(match[2].lower())
    if name is None:
        near = difflib.get_close_matches(match[2].upper(), GPUS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"--gpus {text}: unknown GPU {match[2]}{hint}. Fix: use one of {', '.join(GPUS)}")
    return Cluster(name, GPUS[name], int(match[1]), gpus_per_node, headroom)
