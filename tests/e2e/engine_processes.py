"""The multiprocessing context that engines start in."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def engine_context() -> ForkServerContext:
    """Return a context that forks processes from a server with vLLM imported, which saves ten seconds per process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.engine_imports"])
    return context
