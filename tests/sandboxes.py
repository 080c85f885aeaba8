"""Helpers for sandbox tests: low limits, and running Python programs in a sandbox."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

from megarl.config.schema import Sandbox as Limits
from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import Finished


def limits(**changed: Any) -> Limits:
    defaults = dict(
        **dict(provider="auto", unsafe="refuse", image=None, wall_s=120.0, cpu_s=10, memory_mib=256),
        **dict(processes=16, file_mib=8, output_bytes=10_000),
    )
    return Limits(**defaults | changed)


def finish(provider: Provider, *programs: str, **options: Any) -> Finished:
    """Run Python programs in one sandbox, one after the other. Return the last one's result."""

    async def run() -> Finished:
        async with await provider.start() as sandbox:
            for program in programs:
                arguments = [provider.python, "-c", textwrap.dedent(program)]
                finished = await sandbox.run(arguments, **options)
        return finished

    return asyncio.run(run())


def printed(provider: Provider, *programs: str) -> str:
    """Return the stdout of the last program, which must succeed."""
    finished = finish(provider, *programs)
    assert finished.succeeded, (finished, finished.stderr.decode())
    return finished.stdout.decode()
