"""Try the reward functions on data rows before the run starts."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.types import Prompt, Sample, Score, VersionRun
from megarl.environments.batch import judge_batch, judge_single
from megarl.rewards import judge
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer

MAX_ROWS = 16
"""Number of rows tried if rewards.failure_limit permits some of them to fail."""


def try_rewards(config: Config, pool: FunctionPool, prompts: Sequence[Prompt]) -> Score:
    """Score the first row's answer as if it were a response. Raise UserError with the stack trace if a reward function
    fails on more answers than rewards.failure_limit permits. Only print a warning if the failure is permitted, if the
    infrastructure caused it, or if the row has no answer."""
    score, stack = _try_row(config, pool, prompts[0])
    if score.failure is None:
        return score
    failure = f"{score.failure} (megarl used the row's answer as the response in this trial)"
    if not score.is_infrastructure and prompts[0].answer is not None:
        limit = config.rewards.failure_limit
        others = prompts[1:MAX_ROWS] if limit else []
        num_failed = 1 + sum(_try_row(config, pool, prompt)[0].failure is not None for prompt in others)
        if num_failed > limit * (1 + len(others)):
            remedy = "correct the reward function, which must return a finite number or a bool"
            raise UserError(f"{failure}. Fix: {remedy}\n{textwrap.indent(stack, '    ')}".rstrip())
    print(f"megarl: warning: {failure}", file=sys.stderr, flush=True)
    return score


def _try_row(config: Config, pool: FunctionPool, prompt: Prompt) -> tuple[Score, str]:
    """Score the prompt's reference answer as if it were a response, without the reward model. Batch functions receive a
    batch of one, and the judge compares the answer with itself. Return the score, and the stack trace of the first
    function that raised an exception, or ""."""
    rewards = config.rewards
    scorer = Scorer(rewards.functions)
    sample = _reference_sample(prompt)

    async def function_results() -> dict[str, Result]:
        names = [entry.label for entry in rewards.functions]
        single = await judge_single(pool, [name for name in names if name not in pool.batch_functions], sample)
        [batch] = await judge_batch(pool, [sample])
        return {**single, **batch}

    results = asyncio.run(function_results())
    verdict, stacks = None, [result.stack for result in results.values()]
    if rewards.judge is not None:
        samples = [sample, replace(sample, id=f"{sample.id} again")]
        comparisons = judge.comparisons(samples, rewards.judge_order, config.run.seed)
        calls = [pool.call(judge.NAME, *item.arguments, columns=item.columns) for item in comparisons]
        judged = [call.result() for call in calls]
        verdict = judge.verdicts(samples, zip(comparisons, judged, strict=True))[sample.id]
        stacks += [result.stack for result in judged]
    return scorer.score(sample, results, verdict=verdict)[0], next(filter(None, stacks), "")


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
