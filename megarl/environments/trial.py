"""Try the reward functions on data rows before the run starts."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.latents import AnySample, Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.data.image_files import ImageFiles
from megarl.environments.batch import judge_batch, judge_single
from megarl.rewards import judge
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer

MAX_ROWS = 16
"""Number of rows whose answers are tried if rewards.failure_limit permits some of them to fail."""

ANSWER = "the row's answer as the response"

WRONG = "This response is wrong."
"""The wrong response, which is tried after the answer and the empty response."""

GRAY = 128
"""Pixel value of the uniform gray image in the trial."""

REMEDY = "make the reward function return a finite number or a bool for any response"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one reward function or of the judge. response: description of the scored response. stack: stack
    trace of the exception, or "" if none was raised."""

    message: str
    response: str
    stack: str
    is_infrastructure: bool


def try_rewards(
    config: Config, pool: FunctionPool, prompts: Sequence[Prompt], images: ImageFiles | None = None
) -> dict[str, float]:
    """For the first row that each function applies to, score the answer, an empty response and a wrong one. For an
    image model, score a flat image and a noise image. Return the rewards of the first responses by function name.
    `images`: the prompts' image files; None if prompts have no images.

    Raise UserError with a line and a stack trace for each reward function that fails on one of these responses. Only
    print a warning if the infrastructure caused the failure, or if rewards.failure_limit permits it. A limit above 0
    permits failures on responses other than the answer, because their fraction in the run is unknown."""
    limit = config.rewards.failure_limit
    rewards: dict[str, float] = {}
    failures: dict[str, Failure] = {}
    for bare, functions in _first_rows(config, pool, prompts):
        prompt = bare if images is None else images.attach(bare)
        for response, description in _responses(config, prompt):
            if functions <= failures.keys():
                break  # do not wait for rewards.timeout_s per response if functions hang
            score, failed = _try_response(config, pool, _sample(prompt, response), description)
            failures |= {name: failure for name, failure in failed.items() if name not in failures}
            rewards |= {name: part for name, part in score.parts.items() if name not in rewards | failures}
    answers_fail = any(failure.response == ANSWER for failure in failures.values())
    answers_may_fail = limit > 0 and answers_fail and not _exceeds_limit(config, pool, prompts, images)
    errors: list[str] = []
    for failure in failures.values():
        line = f"{failure.message} (megarl used {failure.response} in this trial)"
        may_fail = answers_may_fail if failure.response == ANSWER else limit > 0
        if failure.is_infrastructure or may_fail:
            print(f"megarl: warning: {line}", file=sys.stderr, flush=True)
        else:
            remedy = "" if "Fix: " in failure.message else f". Fix: {REMEDY}"
            errors.append(f"{line}{remedy}\n{textwrap.indent(failure.stack, '    ')}".rstrip())
    if errors:
        raise UserError("\n".join(errors))
    return rewards


def _first_rows(config: Config, pool: FunctionPool, prompts: Sequence[Prompt]) -> list[tuple[Prompt, set[str]]]:
    """Return the first row that each function applies to, and the names of all functions that apply to it, including
    the judge. The first row of the data comes first. Functions that apply to no row are not tried."""
    names = [entry.label for entry in config.rewards.functions]
    first = {next((i for i, prompt in enumerate(prompts) if pool.judges(name, prompt)), 0) for name in names}
    always = set[str]() if config.rewards.judge is None else {judge.NAME}
    return [(prompts[i], always | {n for n in names if pool.judges(n, prompts[i])}) for i in sorted({0} | first)]


def _responses(config: Config, prompt: Prompt) -> list[tuple[str | NDArray[np.uint8], str]]:
    """Return the responses to try, each with its description."""
    if config.samples_images:
        denoising = config.rollout.denoising
        shape = denoising.height, denoising.width, 3
        noise = np.random.Generator(np.random.Philox(0)).integers(0, 256, shape, np.uint8)
        return [(np.full(shape, GRAY, np.uint8), "a gray image"), (noise, "a noise image")]
    answer = {} if prompt.answer is None else {_reference(prompt): ANSWER}
    return list((answer | {"": "an empty response", WRONG: f"the wrong response {WRONG!r}"}).items())


def _exceeds_limit(config: Config, pool: FunctionPool, prompts: Sequence[Prompt], images: ImageFiles | None) -> bool:
    """Return whether scoring fails for more than rewards.failure_limit of the first rows' answers."""
    rows = prompts[:MAX_ROWS] if images is None else [images.attach(prompt) for prompt in prompts[:MAX_ROWS]]
    samples = [_sample(prompt, _reference(prompt)) for prompt in rows]
    failed = [_try_response(config, pool, sample, ANSWER)[0].failure is not None for sample in samples]
    return sum(failed) > config.rewards.failure_limit * len(rows)


def _try_response(
    config: Config, pool: FunctionPool, sample: AnySample, description: str
) -> tuple[Score, dict[str, Failure]]:
    """Score a sample without the reward model. Batch functions receive a batch of one, and the judge
    compares the response with itself. Return the score, and the failures by function name."""
    scorer = Scorer(config.rewards.functions)
    results = asyncio.run(_call_functions(config, pool, sample))
    scores = {name: scorer.score(sample, {name: result})[0] for name, result in results.items()}
    stacks = {name: result.stack for name, result in results.items()}
    verdict = None
    if config.rewards.judge is not None and isinstance(sample, Sample):
        samples = [sample, replace(sample, id=f"{sample.id} again")]
        comparisons = judge.comparisons(samples, config.rewards.judge_order, config.run.seed)
        calls = [pool.call(judge.NAME, *item.arguments, columns=item.columns) for item in comparisons]
        judged = [call.result() for call in calls]
        verdict = judge.verdicts(samples, zip(comparisons, judged, strict=True))[sample.id]
        scores[judge.NAME] = scorer.score(sample, {}, verdict=verdict)[0]
        stacks[judge.NAME] = next((result.stack for result in judged if result.stack), "")
    total = scorer.score(sample, results, verdict=verdict)[0]
    if not any(score.failure for score in scores.values()):
        scores["sum"] = total  # the weighted sum itself may fail, because it is too large
    failures = {
        name: Failure(score.failure, description, stacks.get(name, ""), score.is_infrastructure)
        for name, score in scores.items()
        if score.failure is not None
    }
    return total, failures


async def _call_functions(config: Config, pool: FunctionPool, sample: AnySample) -> dict[str, Result]:
    """Call the functions that apply to the sample. Return their results by name."""
    names = [entry.label for entry in config.rewards.functions if entry.label not in pool.batch_functions]
    single = await judge_single(pool, names, sample)
    [batch] = await judge_batch(pool, [sample])
    return {**single, **batch}


def _reference(prompt: Prompt) -> str:
    """Return the prompt's answer, or the answer's JSON if it is not a string."""
    answer = prompt.answer
    return "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _sample(prompt: Prompt, response: str | NDArray[np.uint8]) -> AnySample:
    """Return a one-token sample with this text, or a sample of one denoising step with this image."""
    if not isinstance(response, str):
        no_steps, no_latents = np.empty(0, np.int32), np.empty((0, 1, 1, 1), np.float32)
        sigmas, logprobs, versions = np.array([1.0, 0.0]), np.empty(0, np.float32), (VersionRun(0, 1),)
        embedding = Conditioning(np.empty((1, 0), np.float32))
        return LatentSample(
            *(prompt.id, prompt, sigmas, no_steps, no_latents, logprobs, versions, embedding, None, 0), image=response
        )
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
