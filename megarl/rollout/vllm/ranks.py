"""Check the processes of an engine's ranks."""

from __future__ import annotations

from vllm import LLM


def has_lost_a_rank(llm: LLM) -> bool:
    """Return whether one of the ranks has died. A single rank runs in the engine's own process."""
    return getattr(llm.llm_engine.model_executor, "is_failed", False)
