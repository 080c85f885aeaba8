"""Calls of reward functions: of single samples, and of all samples of a scoring pass at once. The latter see groups,
the responses to one prompt, which stand side by side, and may do a call to elsewhere once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.core.types import Sample
from megarl.environments.pool import FunctionPool, columns_of
from megarl.rewards.result import Result


def is_judged(sample: Sample) -> bool:
    """Returns whether reward functions read a sample: of a rollout in an environment they read the last one, unless it
    has failed."""
    return sample.episode is None or (sample.episode.is_last and sample.episode.failure is None)


async def judge_single(pool: FunctionPool, functions: Sequence[str], sample: Sample) -> dict[str, Result]:
    """Calls those of these functions of the pool that judge the sample's source, side by side. Returns the sample's
    results, by function."""
    prompt, columns = sample.prompt, columns_of(sample)
    judging = [name for name in functions if pool.judges(name, prompt)]
    calls = [
        asyncio.wrap_future(pool.call(name, prompt.text, sample.text, prompt.answer, columns=columns))
        for name in judging
    ]
    return dict(zip(judging, await asyncio.gather(*calls), strict=True))


async def judge_batch(pool: FunctionPool, samples: Sequence[Sample]) -> list[dict[str, Result]]:
    """Calls the pool's functions of batches, side by side and each once, with the samples that it judges. Returns the
    results of each sample, by function."""
    results: list[dict[str, Result]] = [{} for _ in samples]

    async def call(name: str) -> None:
        judged = [i for i, sample in enumerate(samples) if pool.judges(name, sample.prompt)]
        if not judged:
            return
        chosen = [samples[i] for i in judged]
        prompts, responses = [sample.prompt for sample in chosen], [sample.text for sample in chosen]
        future = pool.call_batch(name, prompts, responses, [columns_of(sample) for sample in chosen])
        for i, result in zip(judged, await asyncio.wrap_future(future), strict=True):
            results[i][name] = result

    await asyncio.gather(*map(call, pool.batch_functions))
    return results
