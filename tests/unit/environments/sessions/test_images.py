"""Images over the session endpoint: recorded samples, changed images, and refused requests."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.config.load import load
from megarl.core.prompt import Prompt
from megarl.data.turns import ChatTokens
from megarl.environments.images import ImageReader, ImageStore, RolloutImages
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import Session, SessionLimits
from megarl.environments.transcript import Part
from tests import tiny_vision
from tests.paths import QUICKSTART
from tests.scripted_policy import ScriptedPolicy
from tests.unit.environments.screens import FIRST, LITERAL, SECOND, encoded, picture
from tests.unit.environments.test_images import EOS_ID, TURN, folder, ids, message  # noqa: F401

TOKENIZER = tiny_vision.tokenizer()
LIMITS = SessionLimits(max_turns=8, turn_tokens=None, max_new_tokens=2000, context_length=4000)


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
) -> tuple[Session, list[Part]]:
    """Run an agent in a session. Return the session and its samples."""

    async def main() -> tuple[Session, list[Part]]:
        server = SessionServer(TOKENIZER, lambda tools: ChatTokens(TOKENIZER, tools))
        await server.start("127.0.0.1")
        config = load(QUICKSTART, [f"model.vision={has_vision}".lower()])
        reader = ImageReader.of(config, folder, ImageStore())
        session = server.open(policy, LIMITS, 5, RolloutImages(reader))
        headers = {"Authorization": f"Bearer {session.token}"}
        async with aiohttp.ClientSession(headers=headers) as client:

            async def ask(*messages: Any) -> tuple[int, Any]:
                body = {"model": "policy", "messages": list(messages)}
                async with client.post(f"{server.base_url}/chat/completions", json=body) as response:
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
    """User and tool messages have images. The placeholder as text stays text."""
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


REFUSED = {
    "http": ({"role": "user", "content": [image("https://localhost/a.png")]}, "Images are not downloaded"),
    "path": ({"role": "user", "content": [image("/etc/hostname")]}, "whose URL is not a data: URL"),
    "nothing": ({"role": "user", "content": [{"type": "image_url"}]}, "has an image without a URL"),
    "damaged": (user(FIRST[:200]), "it cannot be decoded"),
    "base64": ({"role": "user", "content": [image("data:image/png;base64,a")]}, "is not valid base64"),
    "system": (user(FIRST, role="system"), "only user and tool messages may contain images"),
    "audio": ({"role": "user", "content": [{"type": "input_audio"}]}, "only text and images are supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_image_is_a_bad_request(folder, name):  # noqa: F811
    refused, reason = REFUSED[name]

    async def agent(ask: Ask) -> None:
        status, body = await ask(refused)
        assert status == 400 and reason in body["error"]["message"]
        assert body["error"]["type"] == "invalid_request_error"
        assert (await ask(user("text")))[0] == 200, "the session continues"

    in_session(folder, ScriptedPolicy(TOKENIZER, ["a"]), agent)


def test_text_policy_refuses_images(folder):  # noqa: F811
    async def agent(ask: Ask) -> None:
        status, body = await ask(user(FIRST))
        assert status == 400 and "the model does not receive images" in body["error"]["message"]

    in_session(folder, ScriptedPolicy(TOKENIZER, []), agent, has_vision=False)


def test_image_may_be_larger_than_the_text_of_a_request(folder):  # noqa: F811
    large = encoded(picture(1000, 800))

    async def agent(ask: Ask) -> None:
        assert len(url(large)) > 2 * 2**20
        assert (await ask(user(large)))[0] == 200
        for text in ("x" * (2 * 2**20), "data:image/png;base64,[" + "," * (2 * 2**20)):
            status, body = await ask(user(text, FIRST))
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    in_session(folder, ScriptedPolicy(TOKENIZER, ["a"]), agent)
