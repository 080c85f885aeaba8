"""A language model as a judge: any server with OpenAI's interface says how good a response is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.rewards.rating import TEMPLATE, question, rating

if TYPE_CHECKING:
    import httpx

FIRST_PAUSE_S = 0.5


class GenerativeJudge:
    """The judge's rating of each response, (rating − lowest) / (highest − lowest): from 0 to 1.

    As in "Judging LLM-as-a-Judge" (https://arxiv.org/abs/2306.05685, single-answer grading). The samples of a scoring
    pass are asked for side by side, and rewards.timeout_s is the time of all of them. A question that the server does
    not answer, and an answer without a rating in the scale, is the failure of its sample, never a 0.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        template: str = TEMPLATE,
        scale: Sequence[float] = (1, 10),
        api_key_env: str | None = None,
        timeout_s: float = 30.0,
        concurrency: int = 32,
        retries: int = 2,
        max_tokens: int = 1024,
        temperature: float = 0.0,
    ):
        """Takes where the judge is, and what it is asked.

        base_url      such as http://host:8000/v1
        template      its text, with {prompt}, {response} and {answer} in their places; the rating is the last
                      [[number]] of what the judge says
        scale         the lowest and the highest rating
        api_key_env   the name of the environment variable with the key
        timeout_s     of one request
        concurrency   requests that are under way at once
        retries       how often a request is made again that found no connection, or an answer of 429 or from 500 on
        """
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"options.base_url={base_url} is no address; give one such as http://host:8000/v1")
        if "{response}" not in template:
            raise ValueError("options.template has no {response}; say where the judge reads it")
        if len(scale) != 2 or not scale[0] < scale[1]:
            raise ValueError(f"options.scale={list(scale)} is not the lowest and the highest rating, such as [1, 10]")
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"options.concurrency={concurrency!r} is not an integer above 0")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(f"options.api_key_env={api_key_env}: the environment has no such variable; export it")
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {} if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}
        self._question = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._template, self._scale = template, scale
        self._timeout_s, self._concurrency, self._retries = timeout_s, concurrency, retries

    async def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[Any]
    ) -> list[float | BaseException]:
        """Returns the reward of each response, or the error that stands for it."""
        import httpx

        limits = httpx.Limits(max_connections=self._concurrency)
        under_way = asyncio.Semaphore(self._concurrency)
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s, limits=limits) as client:

            async def reward(*fields: Any) -> float:
                async with under_way:
                    return rating(await self._ask(client, question(self._template, *fields)), self._scale)

            samples = zip(prompts, responses, answers, strict=True)
            return await asyncio.gather(*(reward(*fields) for fields in samples), return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, content: str) -> str:
        """Returns what the judge says. Raises ValueError, with what the server said, where it says nothing."""
        import httpx

        body = self._question | {"messages": [{"role": "user", "content": content}]}
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await client.post(self._url, json=body)
            except TimeoutError:
                said = f"did not answer within {self._timeout_s:g} s"
                break
            except httpx.TransportError as error:
                said = f"could not be asked ({type(error).__name__}: {error})"
                continue
            if answer.is_success:
                return _content(answer)
            said = f"answered {answer.status_code} {answer.text[:200]!r}"
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS and not answer.is_server_error:
                break
        raise ValueError(f"{self._url} {said}")


def _content(answer: httpx.Response) -> str:
    try:
        content = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"{answer.url} answered without a message: {answer.text[:200]!r}")
    return content
