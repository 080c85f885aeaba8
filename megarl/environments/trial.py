"""A trial of the reward functions on one data row, before the run starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np

from megarl.config.schema import Config
from megarl.core.types import Prompt, Sample, Score, VersionRun
from megarl.environments.batch import judge_batch, judge_single
from megarl.rewards import judge
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer


def try_rewards(config: Config, pool: FunctionPool, prompt: Prompt) -> Score:
    """Score the prompt's reference answer as if it were a response, without the reward model. Batch functions receive a
    batch of one, and the judge compares the answer with itself."""
    rewards = config.rewards
    scorer = Scorer(rewards.functions)
    sample = _reference_sample(prompt)

    async def function_results() -> dict[str, Result]:
        names = [entry.label for entry in rewards.functions]
        single = await judge_single(pool, [name for name in names if name not in pool.batch_functions], sample)
        [batch] = await judge_batch(pool, [sample])
        return {**single, **batch}

    results = asyncio.run(function_results())
    verdict = None
    if rewards.judge is not None:
        samples = [sample, replace(sample, id=f"{sample.id} again")]
        comparisons = judge.comparisons(samples, rewards.judge_order, config.run.seed)
        calls = [pool.call(judge.NAME, *item.arguments, columns=item.columns) for item in comparisons]
        judged = zip(comparisons, [call.result() for call in calls], strict=True)
        verdict = judge.verdicts(samples, judged)[sample.id]
    return scorer.score(sample, results, verdict=verdict)[0]


def _reference_sample(prompt: Prompt) -> Sample:
    """Return a one-token sample whose text is the prompt's answer, or the answer's JSON if it is not a string."""
    answer = prompt.answer
    text = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return Sample(
        id=prompt.id,
        prompt=prompt,
        response_ids=np.zeros(1, np.int32),
        response_logprobs=np.zeros(1, np.float32),
        response_mask=np.ones(1, np.bool_),
        versions=(VersionRun(0, 1),),
        finish_reason="stop",
        text=text,
    )
