"""Given responses: some prompts are trained on the responses in the data (Agarwal et al. 2024,
https://arxiv.org/abs/2306.13649)."""

from __future__ import annotations

import random

import numpy as np

from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import GIVEN, Sample
from megarl.data.prompts import GivenResponse
from megarl.step.state import PendingPrompt


def is_given(config: Config, item: PendingPrompt) -> bool:
    """Return whether the prompt is trained on its given response. The decision depends only on run.seed and the number
    of the draw, so resumed runs and restarted rollouts repeat it."""
    if not config.trains_given_responses:
        return False
    drawn = random.Random(f"{config.run.seed}.given.{item.draw}").random()
    return drawn >= config.algorithm.distillation.on_policy_share


def given_sample(group: str, prompt: Prompt, response: GivenResponse, version: int) -> Sample:
    """Return the only sample of a group, STEP.GROUP. Its log-probs are 0, because no engine has computed them.
    `version`: the current weight version."""
    num_tokens = len(response.token_ids)
    return Sample(
        id=f"{group}.{GIVEN}",
        prompt=prompt,
        response_ids=response.token_ids,
        response_logprobs=np.zeros(num_tokens, np.float32),
        response_mask=response.mask,
        versions=(VersionRun(version, num_tokens),),
        finish_reason="stop",
        text=response.text,
    )
