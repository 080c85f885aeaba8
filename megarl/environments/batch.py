"""Calls reward functions with single samples or with whole batches.

Batch functions receive all samples in a scoring pass. Responses to the same prompt are adjacent, and one request to an
external service can score all samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.core.latents import AnySample
from megarl.rewards.pool import FunctionPool, columns_of
from megarl.rewards.result import Result


def is_judged(sample: AnySample) -> bool:
    """Return whether reward functions score the sample. In an environment, they score only the last sample of a rollout
    that has not failed."""
    return sample.episode is None or (sample.episode.is_last and sample.episode.failure is None)


async def judge_single(pool: FunctionPool, functions: Sequence[str], sample: AnySample) -> dict[str, Result]:
    """Concurrently call the functions that apply to the sample's data source. Return their results by name."""
    prompt, columns = sample.prompt, columns_of(sample)
    judging = [name for name in functions if pool.judges(name, prompt)]
    calls = [
        asyncio.wrap_future(pool.call(name, prompt.text, sample.response, prompt.answer, columns=columns))
        for name in judging
    ]
    return dict(zip(judging, await asyncio.gather(*calls), strict=True))


async def judge_batch(pool: FunctionPool, samples: Sequence[AnySample]) -> list[dict[str, Result]]:
    """Call the batch functions concurrently, each once with all its samples. Return each sample's results by name."""
    results: list[dict[str, Result]] = [{} for _ in samples]

    async def call(name: str) -> None:
        judged = [i for i, sample in enumerate(samples) if pool.judges(name, sample.prompt)]
        if not judged:
            return
        batch = [samples[i] for i in judged]
        prompts, responses = [sample.prompt for sample in batch], [sample.response for sample in batch]
        future = pool.call_batch(name, prompts, responses, [columns_of(sample) for sample in batch])
        for i, result in zip(judged, await asyncio.wrap_future(future), strict=True):
            results[i][name] = result

    await asyncio.gather(*map(call, pool.batch_functions))
    return results
