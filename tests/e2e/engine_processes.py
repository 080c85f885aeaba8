"""The context of processes that engines start in."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def engine_context() -> ForkServerContext:
    """Return a context whose processes are forks of one that has imported vLLM, which takes ten seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.engine_imports"])
    return context
