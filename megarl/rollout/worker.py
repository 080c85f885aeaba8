"""Receive and describe the weights in a worker of any engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from megarl.resharding.execute import execute
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region, check_weights
from megarl.rollout.engine import SyncStats


class WeightReceiver:
    """Receives the trainer's weights in one worker. One plan serves all refits."""

    def __init__(
        self,
        plan: CompactPlan,
        channel: Channel,
        holder: Holder,
        parameters: Mapping[str, torch.Tensor],
        in_place: bool = True,
    ):
        """`in_place`: see Channel.open."""
        self.holder = holder
        part = plan.part([holder.name])
        self.writes = part.into(holder.name)
        self.transport = channel.open(holder.name, parameters, part, in_place)

    def write(self, parameters: Mapping[str, torch.Tensor], expected: Mapping[Region, Checksum] | None) -> SyncStats:
        """Write the weights into the live parameters. Raise a RuntimeError if they do not match the `expected`
        checksums (None: not verified)."""
        num_bytes = execute(self.writes, parameters, self.transport)
        checksums = {} if expected is None else check_weights(self.holder, parameters, expected)
        return SyncStats(num_bytes, self.transport.staging_bytes, checksums)


def shapes_and_dtypes(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(parameter.shape), dtype_name(parameter.dtype)) for name, parameter in parameters.items()}


def hashes(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each parameter's bytes: parameter name -> SHA-256."""
    # Clone, because torch cannot free memory shared with NumPy, and a sleeping engine must free its parameters.
    return {
        name: hashlib.sha256(parameter.cpu().clone().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in parameters.items()
    }


def describe_arithmetic() -> str:
    """Describe torch's settings that can change the last digits of results when an engine restarts."""
    return (
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, float32 matmul precision "
        f"{torch.backends.fp32_precision}"  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs
    )
