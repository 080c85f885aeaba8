"""Calls of reward functions: of single samples, and of all samples of a scoring pass at once. The latter see groups, the
responses to one prompt, which stand side by side, and may do a call to elsewhere once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.core.types import Sample
from megarl.environments.pool import FunctionPool
from megarl.rewards.result import Result


async def judge_single(pool: FunctionPool, functions: Sequence[str], sample: Sample) -> dict[str, Result]:
    """Calls these functions of the pool for one sample, side by side. Returns its results, by function."""
    prompt = sample.prompt
    calls = [
        asyncio.wrap_future(pool.call(name, prompt.text, sample.text, prompt.answer, columns=prompt.columns))
        for name in functions
    ]
    return dict(zip(functions, await asyncio.gather(*calls), strict=True))


async def judge_batch(pool: FunctionPool, samples: Sequence[Sample]) -> list[dict[str, Result]]:
    """Calls the pool's functions of batches, side by side and each once. Returns the results of each sample, by
    function."""
    prompts, responses = [sample.prompt for sample in samples], [sample.text for sample in samples]
    calls = [asyncio.wrap_future(pool.call_batch(name, prompts, responses)) for name in pool.batch_functions]
    by_function = dict(zip(pool.batch_functions, await asyncio.gather(*calls), strict=True))
    return [{name: results[i] for name, results in by_function.items()} for i in range(len(samples))]
