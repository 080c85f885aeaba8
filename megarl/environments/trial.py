"""Try the reward functions on data rows before the run starts."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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

WRONG = "This response is wrong."
"""A response that is tried besides the answer and the empty response."""

REMEDY = "correct the reward function, which must return a finite number or a bool"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one reward function or of the judge. stack: its stack trace, or "" if it raised no exception."""

    message: str
    stack: str
    is_infrastructure: bool


def try_rewards(config: Config, pool: FunctionPool, prompts: Sequence[Prompt]) -> Score:
    """Score the first row's answer, an empty response and a wrong one. Return the score of the answer, or of the empty
    response if the row has no answer.

    Raise UserError with a line and a stack trace for each reward function that fails on one of them. Only print a
    warning if the infrastructure caused the failure, or if rewards.failure_limit permits it. A limit above 0 permits
    failures on responses other than the answer, because their fraction in the run is unknown."""
    prompt, limit = prompts[0], config.rewards.failure_limit
    responses = {"": "an empty response", WRONG: f"the wrong response {WRONG!r}"}
    if prompt.answer is not None:
        responses = {_reference(prompt): "the row's answer as the response"} | responses
    first: Score | None = None
    failures: dict[str, str] = {}
    errors: list[str] = []
    for response, description in responses.items():
        score, failed = _try_response(config, pool, prompt, response)
        is_answer = first is None and prompt.answer is not None
        first = first or score
        for name, failure in failed.items():
            if name in failures:
                continue
            failures[name] = line = f"{failure.message} (megarl used {description} in this trial)"
            is_permitted = limit > 0 and not (is_answer and _exceeds_limit(config, pool, prompts))
            if failure.is_infrastructure or is_permitted:
                print(f"megarl: warning: {line}", file=sys.stderr, flush=True)
            else:
                errors.append(f"{line}. Fix: {REMEDY}\n{textwrap.indent(failure.stack, '    ')}".rstrip())
        if len(failures) == len(config.rewards.functions) + (config.rewards.judge is not None):
            break  # a function that hangs would take rewards.timeout_s for each response
    if errors:
        raise UserError("\n".join(errors))
    assert first is not None, "there is at least one response"
    return first


def _exceeds_limit(config: Config, pool: FunctionPool, prompts: Sequence[Prompt]) -> bool:
    """Return whether more than rewards.failure_limit of the first rows' answers fail. The first one has failed."""
    others = prompts[1:MAX_ROWS]
    failed = [_try_response(config, pool, prompt, _reference(prompt))[0].failure is not None for prompt in others]
    return 1 + sum(failed) > config.rewards.failure_limit * (1 + len(others))


def _try_response(
    config: Config, pool: FunctionPool, prompt: Prompt, response: str
) -> tuple[Score, dict[str, Failure]]:
    """Score a response to the prompt without the reward model. Batch functions receive a batch of one, and the judge
    compares the response with itself. Return the score, and the failures by function name."""
    rewards = config.rewards
    scorer = Scorer(rewards.functions)
    sample = _sample(prompt, response)

    async def function_results() -> dict[str, Result]:
        names = [entry.label for entry in rewards.functions]
        single = await judge_single(pool, [name for name in names if name not in pool.batch_functions], sample)
        [batch] = await judge_batch(pool, [sample])
        return {**single, **batch}

    results = asyncio.run(function_results())
    verdict, judged = None, []
    if rewards.judge is not None:
        samples = [sample, replace(sample, id=f"{sample.id} again")]
        comparisons = judge.comparisons(samples, rewards.judge_order, config.run.seed)
        calls = [pool.call(judge.NAME, *item.arguments, columns=item.columns) for item in comparisons]
        judged = [call.result() for call in calls]
        verdict = judge.verdicts(samples, zip(comparisons, judged, strict=True))[sample.id]

    def parts() -> Iterator[tuple[str, Score, Sequence[Result]]]:
        for name, result in results.items():
            yield name, scorer.score(sample, {name: result})[0], [result]
        if verdict is not None:
            yield judge.NAME, scorer.score(sample, {}, verdict=verdict)[0], judged

    failures = {
        name: Failure(score.failure, next((r.stack for r in each if r.stack), ""), score.is_infrastructure)
        for name, score, each in parts()
        if score.failure is not None
    }
    total = scorer.score(sample, results, verdict=verdict)[0]
    if total.failure is not None and not failures:  # the weighted sum is too large
        failures["sum"] = Failure(total.failure, "", total.is_infrastructure)
    return total, failures


def _reference(prompt: Prompt) -> str:
    """Return the prompt's answer, or the answer's JSON if it is not a string."""
    answer = prompt.answer
    return "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _sample(prompt: Prompt, response: str) -> Sample:
    """Return a one-token sample with this text."""
    return Sample(
        id=prompt.id,
        prompt=prompt,
        response_ids=np.zeros(1, np.int32),
        response_logprobs=np.zeros(1, np.float32),
        response_mask=np.ones(1, np.bool_),
        versions=(VersionRun(0, 1),),
        finish_reason="stop",
        text=response,
    )
