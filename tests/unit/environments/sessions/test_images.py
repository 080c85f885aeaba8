"""Images sent to the session endpoint: recorded samples, changed images, and rejected requests."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.config.load import load
from megarl.core.prompt import Prompt
from megarl.data.turns import ChatTokens
from megarl.environments import images
from megarl.environments.images import ImageReader, ImageStore, RolloutImages
from megarl.environments.sessions import server as servers
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import Session, SessionLimits
from megarl.environments.transcript import Part
from tests import tiny_vision
from tests.paths import QUICKSTART
from tests.scripted_policy import ScriptedPolicy
from tests.timing import POLL_S
from tests.unit.environments.screens import FIRST, LITERAL, SECOND, encoded, picture
from tests.unit.environments.test_images import EOS_ID, TURN, folder, ids, message  # noqa: F401

TOKENIZER = tiny_vision.tokenizer()
LIMITS = SessionLimits(max_turns=8, turn_tokens=None, max_new_tokens=2000, context_length=4000)
MIB = 2**20


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def image(link: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": link, "detail": "low"}}


def user(*parts: str | bytes, role: str = "user") -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else image(url(part)) for part in parts]
    return {"role": role, "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


Ask = Callable[..., Awaitable[tuple[int, Any]]]


def in_session(
    folder: Path,  # noqa: F811
    policy: ScriptedPolicy,
    agent: Callable[[Ask], Awaitable[None]],
    has_vision: bool = True,
    limits: SessionLimits = LIMITS,
    store: ImageStore | None = None,
) -> tuple[Session, list[Part]]:
    """Run an agent in a session. Return the session and its samples."""

    async def main() -> tuple[Session, list[Part]]:
        server = SessionServer(TOKENIZER, lambda tools: ChatTokens(TOKENIZER, tools))
        await server.start("127.0.0.1")
        config = load(QUICKSTART, [f"model.vision={has_vision}".lower()])
        reader = ImageReader.of(config, folder, store or ImageStore())
        session = server.open(policy, limits, 5, RolloutImages(reader))
        headers = {"Authorization": f"Bearer {session.token}"}
        async with aiohttp.ClientSession(headers=headers) as client:

            async def ask(*messages: Any) -> tuple[int, Any]:
                body: Any = {"model": "policy", "messages": list(messages)}
                if isinstance(messages[0], AsyncIterator):  # the body
                    [body] = messages
                sent = {"data" if isinstance(body, AsyncIterator) else "json": body}
                async with client.post(f"{server.base_url}/chat/completions", **sent) as response:
                    return response.status, await response.json()

            await agent(ask)
            samples = await server.close(session)
        await server.stop()
        return session, samples

    return asyncio.run(main())


def assert_equals(part: Part, *parts: str | bytes | list[int]) -> None:
    token_ids, images = ids(*parts)
    sample = part.transcript.sample("a", Prompt("p", "", []), "", "a", None)
    assert sample.token_ids.tolist() == token_ids and list(sample.images) == images


def test_repeated_images_continue_the_sample(folder):  # noqa: F811
    """User and tool messages have images. A placeholder that was sent as text stays text."""
    policy = ScriptedPolicy(TOKENIZER, ["a", "b", "c"])
    first, second = user("see ", FIRST, LITERAL), user(SECOND, role="tool")

    async def agent(ask: Ask) -> None:
        assert (await ask(first))[0] == 200
        assert (await ask(first, assistant("a"), second))[0] == 200
        split = user("s", "ee ", FIRST, LITERAL[:3], LITERAL[3:])
        status, body = await ask(split, assistant("a"), second, assistant("b"), user(FIRST))
        assert status == 200 and body["usage"]["prompt_tokens"] == len(policy.asked[2].token_ids)

    session, [sample] = in_session(folder, policy, agent)
    first_turn = [*message("user", "see ", FIRST, LITERAL), TURN, "a", [EOS_ID], "\n"]
    second_turn = [*message("tool", SECOND), TURN, "b", [EOS_ID], "\n"]
    assert_equals(sample, *first_turn, *second_turn, *message("user", FIRST), TURN, "c", [EOS_ID])
    assert [len(asked.images) for asked in policy.asked] == [1, 2, 3]
    assert not session.recording.counts


def test_changed_image_starts_a_new_sample(folder):  # noqa: F811
    policy = ScriptedPolicy(TOKENIZER, ["a", "b", "c"])

    async def agent(ask: Ask) -> None:
        await ask(user(FIRST))
        await ask(user(SECOND), assistant("a"), user("go"))  # rewritten
        await ask(user(FIRST), assistant("a"), user(SECOND))  # continues the first request

    session, [one, two] = in_session(folder, policy, agent)
    start = [*message("user", FIRST), TURN, "a", [EOS_ID], "\n"]
    assert_equals(one, *start, *message("user", SECOND), TURN, "c", [EOS_ID])
    whole = [*message("user", SECOND), *message("assistant", "a"), *message("user", "go")]
    assert_equals(two, *whole, TURN, "b", [EOS_ID])
    assert session.recording.counts == {"rewritten": 1}


def test_branch_keeps_the_images_before_it(folder):  # noqa: F811
    policy = ScriptedPolicy(TOKENIZER, ["a", "b", "c"])

    async def agent(ask: Ask) -> None:
        await ask(user(FIRST))
        await ask(user(FIRST), assistant("a"), user("x"))
        await ask(user(FIRST), assistant("a"), user(SECOND))

    session, [_, branch] = in_session(folder, policy, agent)
    start = [*message("user", FIRST), TURN, "a", [EOS_ID], "\n"]
    assert_equals(branch, *start, *message("user", SECOND), TURN, "c", [EOS_ID])
    assert session.recording.counts == {"forked": 1} and len(branch.transcript.prompt.images) == 2


SENT = "Images are not downloaded. Send its content as data:image/png;base64,CONTENT"
REFUSED = {
    "http": ({"role": "user", "content": [image("https://localhost/a.png")]}, SENT),
    "path": ({"role": "user", "content": [image("/etc/hostname")]}, "whose URL is not a data: URL"),
    "nothing": ({"role": "user", "content": [{"type": "image_url"}]}, "without a URL. Send {'url': 'data:image/png;"),
    "damaged": (user(FIRST[:200]), "it cannot be decoded (image file is truncated). Fix: replace the image"),
    "base64": ({"role": "user", "content": [image("data:image/png;base64,a")]}, "Fix: encode the image again"),
    "system": (user(FIRST, role="system"), "only user and tool messages may contain images. Send the image in a user"),
    "many": (user(*[FIRST] * 257), "more than 256 images. Send fewer images"),
    "audio": ({"role": "user", "content": [{"type": "input_audio"}]}, "only text and images are supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_image_is_a_bad_request(folder, name):  # noqa: F811
    refused, reason = REFUSED[name]

    async def agent(ask: Ask) -> None:
        status, body = await ask(refused)
        message = body["error"]["message"]
        assert status == 400 and reason in message and "row" not in message
        assert body["error"]["type"] == "invalid_request_error"
        assert (await ask(user("text")))[0] == 200, "the session continues"

    in_session(folder, ScriptedPolicy(TOKENIZER, ["a"]), agent)


def test_many_copies_of_an_image_exceed_the_context(folder, monkeypatch):  # noqa: F811
    """100 copies have 400 tokens, which exceed the context of 60 tokens more than four times."""
    monkeypatch.setattr(images, "expand", None)

    async def agent(ask: Ask) -> None:
        status, body = await ask(user(*[SECOND] * 100))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "your messages resulted in more than 240 tokens" in body["error"]["message"]

    limits = replace(LIMITS, context_length=60, max_new_tokens=40)
    in_session(folder, ScriptedPolicy(TOKENIZER, []), agent, limits=limits)


def test_requests_do_not_keep_their_bodies(folder):  # noqa: F811
    """While a turn is sampled, the bodies of rejected requests and of the pending one are not in memory."""
    kept: list[int] = []
    large = encoded(picture(1000, 800))

    class Policy(ScriptedPolicy):
        async def __call__(self, *args, **kwargs):
            gc.collect()
            received = tracemalloc.Filter(True, servers.__file__, all_frames=True)
            traces = tracemalloc.take_snapshot().filter_traces([received]).statistics("filename")
            kept.append(sum(trace.size for trace in traces))
            return await super().__call__(*args, **kwargs)

    class Nowhere(ImageStore):
        def put(self, file: bytes) -> str:
            return "dropped"

    async def agent(ask: Ask) -> None:
        for number in range(4):
            assert (await ask(user(f"{number}" * (MIB // 4))))[0] == 400
            assert (await ask(user(large[:-1000], f"{number}")))[0] == 400
        assert (await ask(user(large)))[0] == 200

    tracemalloc.start(25)
    try:
        in_session(folder, Policy(TOKENIZER, ["a"]), agent, store=Nowhere())
    finally:
        tracemalloc.stop()
    assert len(kept) == 1 and kept[0] < MIB // 4


def test_large_requests_are_received_one_after_another(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(servers, "MAX_LARGE_REQUESTS", 1)

    async def agent(ask: Ask) -> None:
        body = json.dumps({"messages": [user("hi")]}).encode()
        begun, gate = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield body[:10]
            begun.set()
            await gate.wait()
            yield body[10:]

        first = asyncio.create_task(ask(slow()))
        await begun.wait()
        await asyncio.sleep(POLL_S)
        second = asyncio.create_task(ask(user(encoded(picture(1000, 800)))))
        assert (await ask(user("small")))[0] == 200 and not second.done()
        gate.set()
        assert (await first)[0] == (await second)[0] == 200

    in_session(folder, ScriptedPolicy(TOKENIZER, ["a", "b", "c"]), agent)


def test_text_policy_refuses_images(folder):  # noqa: F811
    async def agent(ask: Ask) -> None:
        status, body = await ask(user(FIRST))
        assert status == 400 and "the model does not receive images" in body["error"]["message"]

    in_session(folder, ScriptedPolicy(TOKENIZER, []), agent, has_vision=False)


def test_image_may_be_larger_than_the_text_of_a_request(folder):  # noqa: F811
    large = encoded(picture(1000, 800))

    async def agent(ask: Ask) -> None:
        assert len(url(large)) > 2 * 2**20
        content = base64.b64encode(large).decode()
        parameter = image(f"DATA:image/png;charset=utf-8;BASE64,{content.replace('+', '%2B')}")
        for part in (image(url(large)), parameter):
            assert (await ask({"role": "user", "content": [part]}))[0] == 200
        for text in ("x" * (2 * 2**20), "data:image/png;base64,[" + "," * (2 * 2**20)):
            status, body = await ask(user(text, FIRST))
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    in_session(folder, ScriptedPolicy(TOKENIZER, ["a", "b"]), agent)
