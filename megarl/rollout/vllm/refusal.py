"""Recognize vLLM's errors about invalid engine arguments at startup."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megarl.config.vllm_arguments import EngineSection
from megarl.core.errors import UserError

OUT_OF_MEMORY = re.compile(r"\bmemory\b", re.IGNORECASE)
"""Matches the ValueError that vLLM raises if other processes use the memory, but not pydantic's errors about arguments
such as gpu_memory_utilization."""


def refusal(error: Exception, section: EngineSection, overrides: Mapping[str, Any]) -> UserError | None:
    """Return a UserError if vLLM rejected the engine's arguments, else None. Restarting the engine would not help.
    `overrides` is the section's vllm_overrides."""
    if isinstance(error, UserError) or not isinstance(error, ValueError | NotImplementedError):
        return None
    reason = _reason(error)
    if OUT_OF_MEMORY.search(reason):
        return None
    given = f"{section}.vllm_overrides={dict(overrides)}" if overrides else section
    remedy = f"change the key of {section} that sets this argument"
    if overrides:
        remedy = "change or remove the rejected argument"
    return UserError(f"{given}: vLLM rejects the engine's arguments: {reason}. Fix: {remedy}")


def _reason(error: Exception) -> str:
    """Return an error's message in one line. pydantic's own message includes all arguments."""
    if isinstance(error, ValidationError):
        items = ((item["loc"], item["msg"].removeprefix("Value error, ")) for item in error.errors())
        message = "; ".join(": ".join((*map(str, loc), text)) for loc, text in items)
    else:
        message = str(error) or type(error).__name__
    return " ".join(message.split())
