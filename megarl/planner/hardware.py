"""The stated figures of GPUs and their links, and how much of them a step gets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from megarl.core.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in its usual server of eight, by the figures that its maker states.

    memory_gib     memory that a process can have, as the driver reports it, ECC and firmware taken off
    tflops         dense products of bfloat16, in 10^12 operations a second
    memory_gb_s    of its own memory
    nvlink_gb_s    to the other GPUs of the server, each direction
    network_gb_s   to other servers, each direction: its share of the server's network cards
    host_gb_s      to host memory over PCIe, each direction
    host_gib       its share of the server's host memory
    source         where the figures are stated
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
    "H800-80GB": Gpu(79.6, 989.5, 3350, 200, 50, 64, 256, "H100's, with NVLink of 400 GB/s both directions together"),
    "H20-96GB": Gpu(
        95.6, 148, 4000, 450, 50, 64, 256, "as vendors of HGX H20 state it (NVIDIA has no public datasheet)"
    ),
    "B200-180GB": Gpu(179.1, 2250, 7700, 900, 50, 64, 512, "DGX B200 datasheet (1.44 TB of GPU memory, 62 TB/s, 4 TB)"),
}
"""The known GPUs, by the names that --gpus takes."""

DENSE_SHARE = 0.55
"""The share of a GPU's stated operations that dense layers get, what waits for other ranks aside, which is counted for
itself. Megatron-LM states up to 47 % for whole training steps on H100, such waiting included."""

EXPERT_SHARE = 0.48
EXPERT_ROWS = 256
"""Experts of r rows on a rank get EXPERT_SHARE · r / (r + EXPERT_ROWS): their products are small. The form and
EXPERT_ROWS are an assumption; with 14,336 rows it gives the 468 TFLOP/s (47 %) that Megatron-core states for Mixtral
8x7B."""

MEMORY_SHARE = 0.7
"""The share of its memory's stated bandwidth that an engine's step gets: an assumption."""

LINK_SHARE = 0.75
"""The share of a link's stated bandwidth that a collective of large messages gets: an assumption."""

STORAGE_GB_S = 4
"""The GB that each node writes to the shared file system in a second, while all write: an assumption."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs of a run, in servers that are filled one after the other."""

    name: str
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8

    @property
    def memory_bytes(self) -> float:
        return self.gpu.memory_gib * GIB

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    def link_bytes_per_second(self, ranks: int, stride: int = 1) -> float:
        """Returns what each rank of a group sends in a second, of `ranks` ranks that lie `stride` ranks apart. A ring
        over nodes leaves each of them once, over the network cards of all its ranks there."""
        if ranks * stride <= self.gpus_per_node:
            return LINK_SHARE * 1e9 * self.gpu.nvlink_gb_s
        members = max(1, self.gpus_per_node // stride)
        return LINK_SHARE * 1e9 * min(self.gpu.nvlink_gb_s, self.gpu.network_gb_s * members)

    def describe(self) -> str:
        gpu = self.gpu
        return (
            f"{self.num_gpus} x {self.name} on {self.num_nodes} {'node' if self.num_nodes == 1 else 'nodes'}, each GPU "
            f"with {gpu.memory_gib:g} GiB, {gpu.tflops:g} TFLOP/s, {gpu.memory_gb_s:,} GB/s of memory, "
            f"{gpu.nvlink_gb_s} GB/s in its node, {gpu.network_gb_s:g} GB/s out of it"
        )


def read_cluster(text: str, gpus_per_node: int = 8) -> Cluster:
    """Reads e.g. "64xH100-80GB". Raises UserError for what cannot be read, or an unknown GPU."""
    found = re.fullmatch(r"([1-9]\d*)\s*[xX]\s*(\S+)", text)
    if found is None:
        raise UserError(f"--gpus {text}: expected a number and a GPU, such as 64xH100-80GB")
    if gpus_per_node < 1:
        raise UserError(f"--nodes-of {gpus_per_node}: expected at least one GPU on a node")
    names = {name.lower(): name for name in GPUS} | {name.split("-")[0].lower(): name for name in GPUS}
    name = names.get(found[2].lower())
    if name is None:
        near = difflib.get_close_matches(found[2].upper(), GPUS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--gpus {text}: {found[2]} is unknown; {hint}The known ones are {', '.join(GPUS)}")
    return Cluster(name, GPUS[name], int(found[1]), gpus_per_node)
