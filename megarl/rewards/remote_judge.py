"""A language model as a judge, on any server with an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from megarl.core.text import encodable
from megarl.data.image_parts import FOREIGN_PLACEHOLDER, PLACEHOLDER
from megarl.data.images import shrunk_url
from megarl.rewards.options import BATCH
from megarl.rewards.rating import TEMPLATE, question, rating, require_answer
from megarl.rewards.result import TRUNCATED, UNRATED, WORST_RATING, Rating
from megarl.usercode.failures import ServiceUnavailable

if TYPE_CHECKING:
    import httpx

FIRST_PAUSE_S = 0.5

REJECTIONS = (400, 413, 422)
"""HTTP status codes for requests that a server rejects because of their content or length."""

PARTS = (1, 2, 4, 8)
"""After a rejection, repeat the question with only the first 1/n of the response, for each n until one is accepted."""


MAX_PIXELS = 2**22
"""Default for the maximum area of an image that a judge receives (2048 × 2048)."""

BLIND = ". Fix: use a judge that accepts images, or set options.images=false"
"""Remedy if the judge does not answer questions with images."""


class Rejected(ValueError):
    """Raised if the server rejects a question."""


class Unanswered(ServiceUnavailable):
    """Raised if the server fails on a question with status 500, or does not answer it in time."""


Probes = dict[tuple[str, ...], asyncio.Task[str]]
"""The judge's pending or completed answers to questions with empty responses, by images and question."""


class GenerativeJudge:
    """Reward function that returns a judge's ratings, scaled to (rating − lowest) / (highest − lowest), from 0 to 1.

    This is single-answer grading from "Judging LLM-as-a-Judge" (https://arxiv.org/abs/2306.05685). The requests in a
    scoring pass run concurrently, and rewards.timeout_s covers all of them. While the server is unavailable, requests
    are retried for up to rewards.outage_s.

    A response never causes a failure:

    - If the judge's answer has no rating within the scale, the response gets the worst rating.
    - If the server rejects the question, for example because the response exceeds the judge's context, but accepts it
      with an empty response, the response is truncated. If no part is accepted, it gets the worst rating.
    - If the server returns status 500 or does not answer in time, but answers the question with an empty response, the
      response gets the worst rating.

    The metrics reward/NAME_unrated_frac and reward/NAME_truncated_frac count such responses. Scoring fails if the
    server does not answer a question even with an empty response. It also fails for all unrated responses if most
    responses of a step are unrated.
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
        images: bool = True,
        max_pixels: int = MAX_PIXELS,
    ):
        """Create the function with its options.

        Args:
            base_url: such as http://host:8000/v1.
            template: the question, with placeholders {prompt}, {response} and {answer}. The rating is the last
                [[number]] in the judge's answer.
            scale: lowest and highest rating.
            api_key_env: name of the environment variable that holds the API key.
            timeout_s: timeout for one request, in seconds.
            concurrency: maximum number of concurrent requests.
            retries: number of retries after a failed connection, or after a response with status 429 or at least 500,
                before the server counts as unavailable.
            images: whether to send the prompt's images. If false, the judge sees their placeholders.
            max_pixels: maximum area of an image in pixels; larger images are shrunk.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"options.base_url={base_url}: not a URL. Fix: set it to a URL such as http://host:8000/v1"
            )
        if "{response}" not in template:
            raise ValueError("options.template: does not contain {response}. Fix: insert {response} into the template")
        if len(scale) != 2 or not scale[0] < scale[1]:
            raise ValueError(
                f"options.scale={list(scale)}: expected the lowest and the highest rating. Fix: use a pair, "
                "such as [1, 10]"
            )
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f"options.concurrency={concurrency!r}: must be a positive integer. Fix: use 1 or more")
        if type(max_pixels) is not int or max_pixels < 1:
            raise ValueError(f"options.max_pixels={max_pixels!r}: must be a positive integer. Fix: use 1 or more")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(
                f"options.api_key_env={api_key_env}: this environment variable is not set. Fix: set it to the API key"
            )
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {} if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}
        self._question = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._template, self._scale = template, scale
        self._timeout_s, self._concurrency, self._retries = timeout_s, concurrency, retries
        self._sends_images, self._max_pixels = images, max_pixels
        if not images:  # the pool sends images only to functions with this parameter
            signature = inspect.signature(self)
            self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[: len(BATCH)])

    def check_row(self, answer: Any) -> None:
        require_answer(self._template, answer)

    async def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[Any],
        *,
        prompt_image_files: Sequence[Sequence[bytes]] | None = None,
    ) -> list[float | BaseException]:
        """Return the reward of each response, or an exception if scoring it failed."""
        import httpx

        limits = httpx.Limits(max_connections=self._concurrency)
        slots = asyncio.Semaphore(self._concurrency)
        outage: ServiceUnavailable | None = None
        probes: Probes = {}
        urls = await self._urls(prompt_image_files or ())
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s, limits=limits) as client:

            async def reward(files: Sequence[bytes], *fields: Any) -> Rating:
                nonlocal outage
                async with slots:
                    if outage is not None:  # waiting again for each sample would exceed the timeout
                        raise outage
                    try:
                        return await self._rate_with_remedy(client, [urls[f].result() for f in files], probes, *fields)
                    except ServiceUnavailable as error:
                        outage = error
                        raise

            samples = zip(prompt_image_files or [()] * len(prompts), prompts, responses, answers, strict=True)
            return await asyncio.gather(*(reward(*fields) for fields in samples), return_exceptions=True)

    async def _urls(self, files_by_sample: Sequence[Sequence[bytes]]) -> dict[bytes, asyncio.Task[str]]:
        """Return the data: URL of each image, or the exception raised for it, as completed tasks. Images are encoded
        before the first request and in threads: requests time out while the event loop is blocked."""
        files = dict.fromkeys(file for files in files_by_sample for file in files)
        urls = {file: asyncio.create_task(asyncio.to_thread(shrunk_url, file, self._max_pixels)) for file in files}
        await asyncio.gather(*urls.values(), return_exceptions=True)
        return urls

    async def _rate_with_remedy(self, client: httpx.AsyncClient, images: Sequence[str], *arguments: Any) -> Rating:
        """Call `_rate`, and add a remedy to failures that images may have caused."""
        try:
            return await self._rate(client, images, *arguments)
        except (ValueError, Unanswered) as error:
            if not images:
                raise
            raise (Unanswered if isinstance(error, Unanswered) else Rejected)(f"{error}{BLIND}") from None

    async def _rate(
        self, client: httpx.AsyncClient, images: Sequence[str], probes: Probes, prompt: str, response: str, answer: Any
    ) -> Rating:
        """Return the rating of a response. Raise the same errors as `_ask`.

        Args:
            images: data: URLs.
            probes: this call's requests with empty responses. All responses to a prompt share one.
        """
        rejection: Rejected | None = None
        ask = partial(self._ask, client, images)
        if len(PLACEHOLDER.findall(prompt)) == len(images):  # equal unless the data contains placeholders as text
            numbers = count(1)
            prompt = PLACEHOLDER.sub(lambda _: f"[image {next(numbers)}]", prompt)
        empty = question(self._template, prompt, "", answer)
        for part in dict.fromkeys(response[: len(response) // n] for n in PARTS):
            try:
                text = await ask(question(self._template, prompt, part, answer))
            except Rejected as error:
                if rejection is None:  # a server that rejects the prompt or its images rejects all parts
                    key = (*images, empty)
                    if key not in probes:
                        probes[key] = asyncio.create_task(ask(empty))
                    try:
                        await probes[key]
                    except Rejected:
                        raise error from None
                rejection = rejection or error
                continue
            except Unanswered as error:
                await ask(empty)  # raises an error if the server is at fault
                return Rating(WORST_RATING, {UNRATED: str(error), TRUNCATED: None})
            rated = rating(text, self._scale)
            return Rating(rated, {**rated.issues, TRUNCATED: None if rejection is None else str(rejection)})
        assert rejection is not None, "the loop tries at least one part"
        return Rating(WORST_RATING, {UNRATED: str(rejection), TRUNCATED: None})

    async def _ask(self, client: httpx.AsyncClient, images: Sequence[str], text: str) -> str:
        """Return the judge's answer. Raise ServiceUnavailable if the server is unavailable, Unanswered if the question
        may have caused the failure, Rejected if the server rejects the question, and a ValueError that quotes the
        server's response if it contains no answer."""
        import httpx

        if self._sends_images:  # the server could interpret placeholders in the text as images
            text = FOREIGN_PLACEHOLDER.sub("[image]", text)
        body, failure = self._question | {"messages": [{"role": "user", "content": _content_of(images, text)}]}, ""
        kind = ServiceUnavailable
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            kind = ServiceUnavailable
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await client.post(self._url, json=body)
            except TimeoutError:
                kind, failure = Unanswered, f"did not respond within {self._timeout_s:g} s"
                break
            except httpx.TransportError as error:
                failure = f"could not be reached ({type(error).__name__}: {error})"
                continue
            if response.is_success:
                return _answer(response)
            failure = f"returned status {response.status_code}: {response.text[:200]!r}"
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS and not response.is_server_error:
                refusal = Rejected if response.status_code in REJECTIONS else ValueError
                raise refusal(f"{self._url} {failure}")
            if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
                kind = Unanswered
        raise kind(f"{self._url} {failure}")


def _content_of(images: Sequence[str], text: str) -> str | list[dict[str, Any]]:
    """Return the content of a message with these images, given as data: URLs, followed by the text."""
    if not images:
        return text
    return [*({"type": "image_url", "image_url": {"url": url}} for url in images), {"type": "text", "text": text}]


def _answer(response: httpx.Response) -> str:
    """Return the text of the answer. It is empty if the judge refuses to answer, or stops while reasoning."""
    try:
        content = response.json()["choices"][0]["message"].get("content") or ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"{response.url} returned no message: {response.text[:200]!r}")
    return encodable(content)
