"""The messages of a bucket that is sent: large moves alone, from and to their places, the others packed into one."""

from __future__ import annotations

from megarl.resharding.piece import ITEM_BYTES, num_elements
from megarl.resharding.planning.plan import Bucket, Move

ALIGNMENT = 8
"""The multiple of bytes that keeps moves aligned. A move of another size, which would leave those after it misaligned,
is not alone."""

ALONE_BYTES, ALONE_BYTES_OF_NCCL = 128 * 2**10, 8 * 2**20
"""The bytes from which a move is a message of its own over gloo, and over NCCL: to copy it would take longer than a
message takes to set out. A GPU copies 8 MiB in about 10 µs, and an operation of NCCL takes some 30."""

LATENCY_S = 30e-6
"""The seconds that an operation of NCCL takes beside its bytes. An estimate: it has not been measured."""


def move_bytes(move: Move) -> int:
    """Returns the bytes of what travels."""
    return num_elements(move.destination.rectangle) * ITEM_BYTES[move.destination_dtype]


def is_alone(move: Move, least: int) -> bool:
    """Returns whether the move is a message of its own. least: the bytes from which one is."""
    return move_bytes(move) >= least and move_bytes(move) % ALIGNMENT == 0


def num_messages(bucket: Bucket, least: int = ALONE_BYTES_OF_NCCL) -> int:
    """Returns the number of messages of a bucket over each of its links."""
    alone = sum(is_alone(move, least) for move in bucket.moves)
    return alone + (alone < len(bucket.moves))
