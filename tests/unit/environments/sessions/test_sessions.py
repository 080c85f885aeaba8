"""The session endpoint: its responses to clients, and its recording of what was sampled."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from megarl.core.completion import Completion, VersionRun
from megarl.core.prompt import Prompt
from megarl.data.turns import ChatTokens
from megarl.environments.protocol import StopReason
from megarl.environments.sessions import server as servers
from megarl.environments.sessions.messages import read_messages
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import Session, SessionLimits
from megarl.environments.text_length import num_tokens
from megarl.environments.transcript import Part
from tests.scripted_policy import ScriptedPolicy, call, hermes_tokenizer
from tests.timing import POLL_S, SHORT_S, WAIT_S

PROGRAM = Path(__file__).with_name("openai_program.py")
TOKENIZER = hermes_tokenizer()
LIMITS = SessionLimits(max_turns=8, turn_tokens=None, max_new_tokens=2000, context_length=4000)
QUESTION = [{"role": "user", "content": "What now?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]

Ask = Callable[..., Awaitable[tuple[int, Any]]]


def in_session(
    policy: ScriptedPolicy,
    agent: Callable[[Ask, SessionServer, Session], Awaitable[None]],
    limits: SessionLimits = LIMITS,
) -> tuple[Session, list[Part]]:
    """Run an agent in a session. Return the session and its samples."""

    async def main() -> tuple[Session, list[Part]]:
        server = SessionServer(TOKENIZER, lambda tools: ChatTokens(TOKENIZER, tools), {"temperature": 1.0})
        await server.start("127.0.0.1")
        session = server.open(policy, limits, seed=5)
        async with aiohttp.ClientSession() as client:

            async def ask(
                messages: Any, token: str = session.token, headers: Any = (), **given: Any
            ) -> tuple[int, Any]:
                body = {"model": "policy", "messages": messages, **given}
                headers = {"Authorization": f"Bearer {token}", **dict(headers)}
                async with client.post(f"{server.base_url}/chat/completions", json=body, headers=headers) as response:
                    return response.status, await response.json()

            await agent(ask, server, session)
            samples = await server.close(session)
            assert (await ask(QUESTION))[0] == 401, "a closed session must not respond"
        await server.stop()
        return session, samples

    return asyncio.run(main())


def message_of(answer: tuple[int, Any]) -> dict[str, Any]:
    """Return the message of a response."""
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


def sampled(sample: Part) -> str:
    """Return the trained tokens of a sample as text."""
    made = sample.transcript.sample("a", Prompt("p", "", []), "", "a", None)
    return TOKENIZER.decode(made.response_ids[made.response_mask])


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_openai_client_program_is_recorded_as_sampled(mode: str) -> None:
    script = ["First." + call("multiply", a=6, b=7), call("multiply", a=42, b=2), "It is 84."]
    policy = ScriptedPolicy(TOKENIZER, script)
    printed: list[str] = []

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), mode),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": session.token},
        )
        printed.extend((await program.communicate())[0].decode().splitlines())

    session, [sample] = in_session(policy, agent)
    assert printed[0] == "model policy" and printed[-1] == "answer It is 84."
    made = sample.transcript.sample("a", Prompt("p", "", []), sample.text, "a", None)
    # All turns form one sequence, and each was sampled given all earlier ids. Only turns are trained on.
    assert policy.asked[2].token_ids == made.token_ids[: -len(policy.asked[2].completion.token_ids)].tolist()
    turns = [asked.completion for asked in policy.asked]
    assert np.array_equal(made.response_ids[made.response_mask], np.concatenate([t.token_ids for t in turns]))
    assert np.array_equal(made.response_logprobs[made.response_mask], np.concatenate([t.logprobs for t in turns]))
    assert not made.response_logprobs[~made.response_mask].any()
    context = TOKENIZER.decode(made.response_ids[~made.response_mask])
    assert context.count("<tool_response>42</tool_response>") == context.count("<tool_response>84</tool_response>") == 1
    assert [run.version for run in made.versions] == [0, 1, 2]
    assert made.versions[0] == VersionRun(0, len(turns[0].token_ids))
    assert session.counts["ignored.temperature"] == 3
    if mode == "stream":
        used = [int(line.split()[1]) for line in printed if line.startswith("tokens")]
        assert used == [len(asked.token_ids) + len(asked.completion.token_ids) for asked in policy.asked]


def test_reformatted_messages_continue_the_sampled_tokens() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["  Hm. " + call("look", at="sky", deep=True), " Done.\n", "Bye"])

    async def agent(ask: Ask, *_: Any) -> None:
        message = message_of(await ask(QUESTION, tools=TOOLS))
        assert message["content"] == "Hm." and json.loads(message["tool_calls"][0]["function"]["arguments"]) == {
            "at": "sky",
            "deep": True,
        }
        made = {"name": "look", "arguments": '{"deep":   true, "at": "sky"}'}
        turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": made}]}
        turn["content"] = [{"type": "text", "text": "Hm."}]
        talk = [*QUESTION, turn, {"role": "tool", "tool_call_id": "x", "content": "blue"}]
        message = message_of(await ask(talk, tools=TOOLS))
        talk += [{"role": "assistant", "content": message["content"].strip()}, {"role": "user", "content": "more"}]
        message_of(await ask(talk, tools=TOOLS))

    session, [sample] = in_session(policy, agent)
    assert "  Hm. <tool_call>" in TOKENIZER.decode(sample.transcript.ids) and not session.recording.counts
    assert sampled(sample).count("<|im_end|>") == 3


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda talk: [*talk[:-2], {"role": "assistant", "content": "No."}, talk[-1]], "rewritten"),
        (lambda talk: [{"role": "user", "content": "In short: one."}], "fresh"),
        (lambda talk: [{"role": "system", "content": "You help."}, *talk], "rewritten"),
    ],
)
def test_unsampled_conversation_starts_a_new_sample(change: Callable[[list], list], count: str) -> None:
    policy = ScriptedPolicy(TOKENIZER, ["One.", "Two."])

    async def agent(ask: Ask, *_: Any) -> None:
        message = message_of(await ask(QUESTION))
        message_of(await ask(change([*QUESTION, message, {"role": "user", "content": "And?"}])))

    session, samples = in_session(policy, agent)
    assert [sampled(sample) for sample in samples] == ["One.<|im_end|>", "Two.<|im_end|>"]
    assert [sample.first_turn for sample in samples] == [0, 1]
    assert session.recording.counts == {count: 1}
    assert samples[1].messages[-1]["content"] == "Two."
    assert policy.asked[1].token_ids == ChatTokens(TOKENIZER).begin(samples[1].messages[:-1])


def test_concurrent_requests_become_branches() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["Start", "Left", "Right", "Left again", "Third"], delay_s=0.05)

    async def agent(ask: Ask, *_: Any) -> None:
        talk = [*QUESTION, message_of(await ask(QUESTION))]

        async def branch(word: str) -> list[Any]:
            messages = [*talk, {"role": "user", "content": word}]
            return [*messages, message_of(await ask(messages))]

        left, _ = await asyncio.gather(branch("left"), branch("right"))
        message_of(await ask([*left, {"role": "user", "content": "on"}]))
        message_of(await ask([*talk, {"role": "user", "content": "third"}]))

    session, samples = in_session(policy, agent)
    trained = [sampled(sample) for sample in samples]
    assert trained == ["Start<|im_end|>Left<|im_end|>Left again<|im_end|>", "Right<|im_end|>", "Third<|im_end|>"]
    assert session.recording.counts == {"forked": 2}
    first = policy.asked[0]
    shared = first.token_ids + first.completion.token_ids.tolist()
    assert all(sample.transcript.ids[: len(shared)] == shared for sample in samples)
    assert [message["content"] for message in samples[1].messages] == ["What now?", "Start", "right", "Right"]
    assert (samples[0].first_turn, samples[0].last_turn) == (0, 3)
    assert len({asked.seed for asked in policy.asked}) == 5


def test_other_tools_start_a_new_sample() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["One.", "Two."])

    async def agent(ask: Ask, *_: Any) -> None:
        message = message_of(await ask(QUESTION, tools=TOOLS))
        message_of(await ask([*QUESTION, message, {"role": "user", "content": "And?"}]))

    session, samples = in_session(policy, agent)
    assert len(samples) == 2 and session.recording.counts == {"rewritten": 1}


def test_turn_and_token_limits_return_openai_errors() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["0123456789", "x" * 100])
    limits = SessionLimits(max_turns=3, turn_tokens=30, max_new_tokens=90, context_length=300)

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        talk = [*QUESTION, message_of(await ask(QUESTION, max_tokens=4)), {"role": "user", "content": "on"}]
        status, body = await ask(talk)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        talk += [body["choices"][0]["message"], {"role": "user", "content": "y" * 100}]
        status, body = await ask(talk)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body = await ask([{"role": "user", "content": "y" * 400}])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert session.stop_reason == "max_tokens"

    session, [sample] = in_session(policy, agent, limits)
    assert [asked.max_new_tokens for asked in policy.asked] == [4, 30]
    assert sampled(sample) == "0123" + "x" * 30
    assert session.recording.num_turns == 2

    policy = ScriptedPolicy(TOKENIZER, ["a"] * 3)

    async def talkative(ask: Ask, *_: Any) -> None:
        for _ in range(3):
            assert (await ask(QUESTION))[0] == 200
        status, body = await ask(QUESTION)
        assert (status, body["error"]["code"]) == (400, "turn_limit_reached")

    session, samples = in_session(policy, talkative, limits)
    assert session.stop_reason == "max_turns" and len(samples) == 3
    assert session.counts["refused.turn_limit_reached"] == 1


def test_concurrent_requests_do_not_exceed_the_turn_limit() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["One", "Two"])
    limits = SessionLimits(max_turns=1, turn_tokens=None, max_new_tokens=90, context_length=300)

    async def agent(ask: Ask, *_: Any) -> None:
        answers = await asyncio.gather(ask(QUESTION), ask([{"role": "user", "content": "And now?"}]))
        assert sorted(status for status, _ in answers) == [200, 400]
        assert [body["error"]["code"] for status, body in answers if status == 400] == ["turn_limit_reached"]

    session, samples = in_session(policy, agent, limits)
    assert (session.stop_reason, len(samples), session.recording.num_turns) == ("max_turns", 1, 1)


def test_stop_string_ends_the_turn_and_is_removed() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["Thought. END and more", "Then"])

    async def agent(ask: Ask, *_: Any) -> None:
        message = message_of(await ask(QUESTION, stop="END"))
        assert message["content"] == "Thought. "
        message_of(await ask([*QUESTION, message, {"role": "user", "content": "on"}]))

    _, [sample] = in_session(policy, agent)
    assert sampled(sample) == "Thought. ENDThen<|im_end|>"


def test_malformed_tool_call_stays_text() -> None:
    policy = ScriptedPolicy(TOKENIZER, [call("look") + "<tool_call>{look}</tool_call>", "plain", call("look")])

    async def agent(ask: Ask, *_: Any) -> None:
        message = message_of(await ask(QUESTION, tools=TOOLS))
        assert "tool_calls" not in message and message["content"].endswith("<tool_call>{look}</tool_call>")
        # Tool call syntax in a user message is plain text, and tool_choice="none" disables parsing.
        message_of(await ask([{"role": "user", "content": call("look")}], tools=TOOLS))
        assert "tool_calls" not in message_of(await ask(QUESTION, tools=TOOLS, tool_choice="none"))

    session, _ = in_session(policy, agent)
    assert session.counts["malformed_calls"] == 1


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"n": 2}, 400, "one choice"),
        ({"tool_choice": "required"}, 400, "the policy chooses"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "an image without a URL"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": {}}]}, 400, "[0].content: expected a string or a list, got dict"),
        ({"messages": [{"role": "assistant", "tool_calls": "a"}]}, 400, "[0].tool_calls: expected a list, got str"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": 3}, 400, "stop"),
        ({"tools": [{"name": "look"}]}, 400, "tools[0]"),
        ({"token": "sk-wrong"}, 401, "no session"),
        ({"token": "é"}, 401, "no session"),
    ],
)
def test_rejected_requests_are_not_recorded(given: dict[str, Any], code: int, words: str) -> None:
    async def agent(ask: Ask, *_: Any) -> None:
        status, body = await ask(**({"messages": QUESTION} | given))
        assert status == code and words in body["error"]["message"] and body["error"]["type"]

    session, samples = in_session(ScriptedPolicy(TOKENIZER, []), agent)
    assert samples == [] and session.recording.num_turns == 0


@pytest.mark.parametrize("added", [[], [{"role": "assistant", "content": "So"}]])
def test_request_that_ends_with_an_answer_is_rejected(added: list[dict[str, str]]) -> None:
    """Covers a sampled turn, and a message that the agent wrote on the policy's behalf."""

    async def agent(ask: Ask, *_: Any) -> None:
        talk = [*QUESTION, message_of(await ask(QUESTION)), *added]
        for messages in (talk, [*QUESTION, {"role": "assistant", "content": "No."}]):
            status, body = await ask(messages)
            assert status == 400 and "the conversation ends with an assistant message" in body["error"]["message"]

    session, [sample] = in_session(ScriptedPolicy(TOKENIZER, ["Yes."]), agent)
    assert session.recording.num_turns == 1 and sampled(sample) == "Yes.<|im_end|>"


def test_retried_request_gets_the_lost_response() -> None:
    policy = ScriptedPolicy(TOKENIZER, ["Once", "Other"])
    is_asked, may_finish = asyncio.Event(), asyncio.Event()

    async def held(*request: Any) -> Completion:
        is_asked.set()
        await may_finish.wait()
        return await policy(*request)

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        async def lose(messages: Any) -> None:
            """Send a request and close the connection before the turn is finished."""
            is_asked.clear()
            may_finish.clear()
            request = asyncio.create_task(ask(messages))
            await is_asked.wait()
            request.cancel()
            await asyncio.wait([request])
            while not all(handler.transport is None for handler in server._runner.server.connections):
                await asyncio.sleep(POLL_S)
            may_finish.set()

        await lose(QUESTION)
        assert message_of(await ask(QUESTION, headers={"x-stainless-retry-count": "1"}))["content"] == "Once"
        await lose([{"role": "user", "content": "Other?"}])  # never retried
        await asyncio.wait(session._completions.values())

    session, samples = in_session(held, agent)
    assert [sampled(sample) for sample in samples] == ["Once<|im_end|>"]
    assert session.counts["replayed"] == 1 and len(policy.asked) == 2


def test_engine_error_reaches_agent_and_run() -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async def agent(ask: Ask, *_: Any) -> None:
        status, body = await ask(QUESTION)
        assert status == 500 and body["error"]["code"] == "engine_failed"

    session, samples = in_session(broken, agent)
    assert str(session.error) == "out of memory" and samples == []


def test_turn_that_cannot_be_read_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ChatTokens.read

    def fail_once(*arguments: Any) -> Any:
        monkeypatch.setattr(ChatTokens, "read", read)
        raise ValueError("odd text")

    monkeypatch.setattr(ChatTokens, "read", fail_once)

    async def agent(ask: Ask, *_: Any) -> None:
        status, body = await ask(QUESTION)
        assert (status, body["error"]["code"]) == (500, "turn_failed")
        assert message_of(await ask(QUESTION))["content"] == "Second"

    session, [sample] = in_session(ScriptedPolicy(TOKENIZER, ["First", "Second"]), agent)
    assert sampled(sample) == "Second<|im_end|>" and session.error is None
    assert session.recording.num_turns == 1 and len(session.recording._samples) == 1


def test_long_message_is_rejected_without_blocking_others() -> None:
    """A long message is tokenized in threads, and only until it exceeds the limit."""
    policy, measured = ScriptedPolicy(TOKENIZER, ["Short."]), []

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        def measure(text: str) -> int:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            measured.append(len(text))
            return num_tokens(TOKENIZER, text)

        session._num_tokens = measure
        long = asyncio.create_task(ask([{"role": "user", "content": "look at it " * 80_000}]))
        status, body = await long
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(measured) < 200_000
        assert message_of(await ask(QUESTION))["content"] == "Short."

    session, [sample] = in_session(policy, agent)
    assert session.counts["refused.context_length_exceeded"] == 1 and sampled(sample) == "Short.<|im_end|>"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_that_exceeds_the_context_is_not_parsed(is_chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.json, "loads", lambda _: pytest.fail("was parsed"))
    body = b"[" + b"[]," * 400_000 + b"0]"

    async def chunks() -> AsyncIterator[bytes]:
        yield body

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        headers, data = {"Authorization": f"Bearer {session.token}"}, chunks() if is_chunked else body
        url = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as client, client.post(url, data=data, headers=headers) as response:
            assert response.status == 400
            assert b'"code": "context_length_exceeded"' in await response.read()

    session, _ = in_session(ScriptedPolicy(TOKENIZER, []), agent)
    assert session.error is None and session.stop_reason == StopReason.MAX_TOKENS


def test_only_long_requests_are_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    in_main_thread, read = [], servers.read_request

    def record(*arguments: Any) -> Any:
        in_main_thread.append(threading.current_thread() is threading.main_thread())
        return read(*arguments)

    monkeypatch.setattr(servers, "read_request", record)

    async def agent(ask: Ask, *_: Any) -> None:
        message_of(await ask(QUESTION))
        status, _ = await ask([{"role": "user", "content": ""}] * 20_000)
        assert status == 400

    in_session(ScriptedPolicy(TOKENIZER, ["Short."]), agent)
    assert in_main_thread == [True, False]


LONG = "look at it " * 80_000
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": json.dumps({"a": LONG})}}


@pytest.mark.parametrize(
    "parts",
    [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}, *QUESTION]},
        {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "look", "description": LONG}}]},
        {"messages": [{"role": "user", "name": LONG, "content": "a"}]},
        {"messages": [{"role": "user", "content": ""}] * 20_000},
    ],
    ids=["tool call", "tool", "name", "number of messages"],
)
def test_long_request_is_rejected_before_it_is_rendered(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTokens, "begin", lambda *_: pytest.fail("was rendered"))

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        status, body = await ask(**parts)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    session, _ = in_session(ScriptedPolicy(TOKENIZER, []), agent)
    assert session.error is None


def test_messages_without_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTokens, "begin", lambda *_: [])

    async def agent(ask: Ask, *_: Any) -> None:
        status, body = await ask([{"role": "user", "content": ""}])
        assert (status, body["error"]["param"]) == (400, "messages")

    session, samples = in_session(ScriptedPolicy(TOKENIZER, []), agent)
    assert session.error is None and samples == []


DEEP = 100_000
BODIES = {
    "half": b'{"messages": [',
    "no object": b"[]",
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * DEEP + b"]" * DEEP,
    "deep, but below the limit of Python's parser": b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}",
    "long integer": b'{"messages": [], "max_tokens": ' + b"9" * 5000 + b"}",
    "role with the wrong type": b'{"messages": [{"role": ["user"], "content": "a"}]}',
    "name with the wrong type": b'{"messages": [{"role": "user", "name": {"a": 1}, "content": "a"}]}',
    "content with the wrong type": b'{"messages": [{"role": "user", "content": 3}]}',
    "text that is not a string": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}',
    "part without text": b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
    "call with the wrong type": b'{"messages": [{"role": "assistant", "tool_calls": [3]}]}',
    "tool with the wrong type": b'{"messages": [{"role": "user", "content": "a"}], "tools": [3]}',
    "stop with the wrong type": b'{"messages": [{"role": "user", "content": "a"}], "stop": [3]}',
}


@pytest.mark.parametrize("name", BODIES)
def test_malformed_body_is_rejected(name: str) -> None:
    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        headers = {"Authorization": f"Bearer {session.token}"}
        url = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as client, client.post(url, data=BODIES[name], headers=headers) as response:
            assert response.status == 400, await response.text()
            assert (await response.json())["error"]["type"] == "invalid_request_error"

    session, _ = in_session(ScriptedPolicy(TOKENIZER, []), agent)
    assert session.error is None


def test_body_that_cannot_be_decompressed_is_rejected() -> None:
    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        headers = {"Authorization": f"Bearer {session.token}", "Content-Encoding": "gzip"}
        url = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as client, client.post(url, data=b"not gzip", headers=headers) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "body")

    in_session(ScriptedPolicy(TOKENIZER, []), agent)


def test_lone_surrogate_in_tool_arguments_is_replaced() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"a": "\\ud800"}'}}]}
    [message] = read_messages([called])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}


def test_renderers_of_recently_used_tools_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_TOOL_SETS", 2)
    created: list[dict[str, str]] = []

    def create(tools: Any) -> ChatTokens:
        created.append(tools[0])
        return ChatTokens(TOKENIZER)

    server = SessionServer(TOKENIZER, create)
    for name in ("a", "b", "a", "c", "a", "b"):
        server._tokens_with([{"name": name}])
    assert [tools["name"] for tools in created] == ["a", "b", "c", "b"] and len(server._tokens) == 2


@pytest.mark.parametrize("arguments", ["[" * DEEP + "]" * DEEP, "9" * 5000, "[" * 80 + "]" * 80])
def test_arguments_that_cannot_be_parsed_stay_text(arguments: str) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    [message] = read_messages([called])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("head", ["", "POST /v1/chat/completions HTTP/1.1\r\nHost:"])
def test_connection_with_slow_headers_is_closed(monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    monkeypatch.setattr("megarl.environments.sessions.server.HEADERS_S", SHORT_S)

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()

    in_session(ScriptedPolicy(TOKENIZER, []), agent)


def test_client_that_does_not_read_its_response_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.environments.sessions.server.SEND_S", SHORT_S)
    delivered: list[bool] = []

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        delivered.append(await servers._send(request, response, bytes(2**26)))
        return response

    async def connect() -> None:
        app = web.Application()
        app.router.add_get("/", send)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        _, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            while not delivered:
                await asyncio.sleep(POLL_S)
        writer.close()
        await runner.cleanup()

    asyncio.run(connect())
    assert delivered == [False]


def test_slow_body_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.environments.sessions.server.BODY_S", SHORT_S)

    async def agent(ask: Ask, server: SessionServer, session: Session) -> None:
        host, port = server.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {session.token}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()

    in_session(ScriptedPolicy(TOKENIZER, []), agent)
