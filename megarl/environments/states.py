"""Hashes of the states in which turns start. Turns with equal hashes are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def state_of(observed: str | Sequence[Mapping[str, Any]] | Sequence[int]) -> int:
    """Return a 64-bit hash of a state. The state is the key from the environment or, without a key, the messages or
    token ids that the policy received since its previous turn. Tool call ids are excluded, because they may be
    random."""
    plain = observed if isinstance(observed, str) else [_without_ids(part) for part in observed]
    digest = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest)


def _without_ids(part: Mapping[str, Any] | int) -> Any:
    if not isinstance(part, Mapping):
        return part
    calls = [call.get("function") for call in part.get("tool_calls") or ()]
    return [part["role"], part["content"], calls]
