"""Divide a bucket into messages: large moves are sent directly between parameters; small moves are packed."""

from __future__ import annotations

from megarl.resharding.piece import ITEM_BYTES, num_elements
from megarl.resharding.planning.plan import Bucket, Move

ALIGNMENT = 8
"""Alignment within a bucket in bytes. A move whose size is not a multiple of it is packed, so that later moves stay
aligned."""

UNPACKED_BYTES, UNPACKED_BYTES_NCCL = 128 * 2**10, 8 * 2**20
"""Minimum size in bytes of a move that is sent unpacked, over gloo and NCCL. For smaller moves, an extra message costs
more than packing: a GPU copies 8 MiB in about 10 µs, and an NCCL operation takes about 30 µs."""

LATENCY_S = 30e-6
"""Estimated fixed cost of an NCCL operation in seconds. It has not been measured."""


def move_bytes(move: Move) -> int:
    """Return the number of bytes that are sent for a move."""
    return num_elements(move.destination.rectangle) * ITEM_BYTES[move.destination_dtype]


def is_unpacked(move: Move, min_bytes: int) -> bool:
    """Return whether the move is sent as its own message; min_bytes is the size threshold."""
    return move_bytes(move) >= min_bytes and move_bytes(move) % ALIGNMENT == 0


def num_messages(bucket: Bucket, min_bytes: int = UNPACKED_BYTES_NCCL) -> int:
    """Return the number of messages that a bucket needs per link."""
    unpacked = sum(is_unpacked(move, min_bytes) for move in bucket.moves)
    return unpacked + (unpacked < len(bucket.moves))
