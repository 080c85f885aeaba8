"""Searches in a corpus file and on a server that speaks Search-R1's protocol."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import ClientResponseError, web

from megarl.core.errors import UserError
from megarl.environments import Step, ToolCall
from megarl.environments.registry import check_environment
from megarl.environments.shipped.search import NO_ACTION, exact_match, first_action, normalize
from megarl.rewards.think_answer import last_answer
from tests.timing import SCAN_CPU_S
from tests.unit.environments.shipped.turns import question, task, turn

PASSAGES = (
    ("Aspirin", "Felix Hoffmann of Bayer made pure aspirin in 1897."),
    ("Penicillin", "Alexander Fleming found penicillin in a dish in 1928."),
    ("Insulin", "Banting and Best of Toronto found insulin in 1921."),
    ("Room 7", "The key q opens it."),
)


@pytest.fixture
def corpus(tmp_path):
    rows = [{"contents": f"{title}\n{text}"} for title, text in PASSAGES[:2]]
    rows += [{"title": title, "text": text} for title, text in PASSAGES[2:]]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def searching(name: str = "search", **options):
    return check_environment(name, options)(**options)


def begun(text: str, expected: object, name: str = "search", **options):
    """Return an environment and its initial conversation."""
    environment = searching(name, **options)
    return environment, asyncio.run(environment.reset(task(question(text), expected)))


def answer(environment, text: str, *calls: ToolCall) -> Step:
    return asyncio.run(environment.step(turn(text, *calls)))


def test_search_and_answer_tags(corpus):
    environment, [message] = begun("Who found it?", ["Alexander Fleming", "Fleming"], corpus=corpus, topk=1)
    assert message["content"].endswith("\n\nWho found it?") and "<search>" in message["content"]
    step = answer(environment, "I look it up. <search> who found penicillin </search><answer>no</answer>")
    found = "<information>Doc 1(Title: Penicillin) " + PASSAGES[1][1] + "</information>"
    assert step == Step(f"\n\n{found}\n\n", reward=0.0, as_is=True)
    assert answer(environment, "<answer>the Fleming.</answer>") == Step(reward=1.0, done=True)
    assert answer(environment, "<answer>Banting</answer>") == Step(reward=0.0, done=True)
    assert answer(environment, "<search>penicillin") == Step(f"\n\n{NO_ACTION}\n\n", reward=0.0, as_is=True)


def test_passages_are_ranked_and_unrelated_ones_left_out(corpus):
    environment, _ = begun("Who?", "he", corpus=corpus, topk=3, inline=False)
    found = answer(environment, "<search>Toronto found</search>").observation
    assert 0 < found.index("Title: Insulin") < found.index("Title: Penicillin")
    assert "Aspirin" not in found
    assert answer(environment, "<search>zebra</search>").observation == "<information></information>"
    assert "Room 7" in answer(environment, "<search>q</search>").observation


def test_instructions_can_be_disabled(corpus):
    assert begun("Who?", "he", corpus=corpus, instructions=False)[1] is None


def test_search_tool_finds_the_same_passages(corpus):
    environment, _ = begun("Who found it?", "Alexander Fleming", "search_tool", corpus=corpus, topk=1)
    [message] = answer(environment, "", ToolCall("search", {"query": "penicillin"})).observation
    assert message["content"] == "Doc 1(Title: Penicillin) " + PASSAGES[1][1]
    assert answer(environment, "So: <answer>Alexander Fleming</answer>") == Step(reward=1.0, done=True)
    assert answer(environment, "alexander fleming") == Step(reward=1.0, done=True)
    call = ToolCall("search", {"query": "Fleming"})
    last = replace(turn("Alexander Fleming", call), is_last=True)
    assert asyncio.run(environment.step(last)) == Step(reward=0.0, done=True)
    assert answer(environment, "It was Alexander Fleming") == Step(reward=0.0, done=True)


@asynccontextmanager
async def server(asked: list[dict], status: int = 200) -> AsyncIterator[str]:
    """Run a retrieval server on a free port, which returns all passages for every query. Yield its URL."""

    async def retrieve(request: web.Request) -> web.Response:
        asked.append(await request.json())
        found = [{"document": {"contents": "\n".join(passage)}, "score": 0.5} for passage in PASSAGES]
        result = [found[: asked[-1]["topk"]] for _ in asked[-1]["queries"]]
        return web.json_response({"result": result}, status=status)

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
def test_server_requests_follow_the_search_r1_protocol(path):
    asked: list[dict] = []

    async def search() -> str:
        async with server(asked) as url:
            environment = searching(url=url + path, topk=2, inline=False)
            await environment.reset(task(question("Who?"), "he"))
            steps = [await environment.step(turn(f"<search>{query}</search>")) for query in ("one", "two")]
            await environment.close()
        assert steps[0] == steps[1]
        return steps[0].observation

    found = asyncio.run(search())
    assert found.splitlines()[1] == "Doc 2(Title: Penicillin) " + PASSAGES[1][1] + "</information>"
    assert asked == [{"queries": [query], "topk": 2, "return_scores": True} for query in ("one", "two")]


def test_server_error_is_raised():
    async def search() -> None:
        async with server([], status=500) as url:
            environment = searching(url=url)
            await environment.reset(task(question("Who?"), "he"))
            try:
                await environment.step(turn("<search>one</search>"))
            finally:
                await environment.close()

    with pytest.raises(ClientResponseError, match="500"):
        asyncio.run(search())


@pytest.mark.parametrize(
    ("text", "normal"),
    [("The  Beatles!", "beatles"), ("a U.S. theme", "us theme"), ("Thea", "thea"), ("an apple, A pear", "apple pear")],
)
def test_answers_are_normalized_as_in_the_paper(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize("text", ["<search>" * 20_000, "<answer>" * 20_000, "<search><answer>" * 10_000])
def test_repeated_tags_are_read_in_linear_time(text):
    begin = time.process_time()
    assert first_action(text) == (None, "") and last_answer(text) is None
    closed = f"{text}</answer> <answer> b </answer>"
    assert first_action(closed)[0] == "answer" and last_answer(closed) == " b "
    assert time.process_time() - begin < SCAN_CPU_S


@pytest.mark.parametrize(
    "text", ["", "a", "<search>", "<answer>a<search>b</answer></search>", "</answer><answer>x</answer>"]
)
@pytest.mark.parametrize("end", ["", "<answer></answer>", "<search>c</search><answer>d<answer>e</answer>"])
def test_results_equal_those_of_regular_expressions(text, end):
    action = re.search(r"<(search|answer)>(.*?)</\1>", text + end, re.DOTALL)
    assert first_action(text + end) == ((None, "") if action is None else (action[1], action[2].strip()))
    answers = re.findall(r"<answer>(.*?)</answer>", text + end, re.DOTALL)
    assert last_answer(text + end) == (answers[-1] if answers else None)


@pytest.mark.parametrize("response", ["", "the", "?!", " "])
def test_answer_without_words_does_not_match_empty_responses(response):
    assert exact_match(response, "A") == exact_match(response, ["An", "..."]) == 0.0
    assert exact_match("a", "A") == exact_match("The The", "the the") == 1.0


def test_exact_match_accepts_alternatives():
    assert exact_match("12", 12) == exact_match("b", ["a b", "B."]) == exact_match("x", {"target": ["x"]}) == 1.0
    assert exact_match("ab", ["a", "b"]) == 0.0
    with pytest.raises(ValueError, match="has no answer to compare with"):
        exact_match("a", None)


def test_invalid_search_options_are_rejected(corpus, tmp_path):
    for options in ({}, {"corpus": corpus, "url": "http://x"}):
        with pytest.raises(UserError, match="needs exactly one of them"):
            searching(**options)
    with pytest.raises(UserError, match="not a file"):
        begun("Who?", "he", corpus=str(tmp_path / "nothing.jsonl"))
    (tmp_path / "rows.jsonl").write_text('{"contents": "a"}\n{"id": 1}\n')
    with pytest.raises(UserError, match=r"line 2 has no passage\. Fix: write a JSON object"):
        begun("Who?", "he", corpus=str(tmp_path / "rows.jsonl"))
