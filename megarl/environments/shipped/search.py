"""Questions that are answered with the help of a search engine. (Search-R1: Jin et al. 2025, arXiv 2503.09516)"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.environments.protocol import Environment, Step, Task, Turn
from megarl.environments.shipped.retrieval import Retriever, open_retriever
from megarl.environments.tools import Message, tool

INSTRUCTIONS = (
    "Answer the question below. Think inside <think> and </think> first, whenever you have learned something new. To "
    "look something up, write <search> your query </search>: what is found is then given to you between <information> "
    "and </information>. Search as often as you want. Write the answer, without more words than it needs, as <answer> "
    "Paris </answer>.\n\n"
)
NO_ACTION = (
    "This was neither a search nor an answer. To search, write the query between <search> and </search>; to answer, "
    "write the answer between <answer> and </answer>."
)

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


class _Searching(Environment):
    """The options that both ways to search have."""

    def __init__(self, corpus: str | None = None, url: str | None = None, topk: int = 3, timeout_s: float = 30.0):
        """
        corpus      a JSON-lines file of passages, which are ranked by BM25
        url         or a retrieval server
        topk        passages a query
        timeout_s   of a request to the server
        """
        if (corpus is None) == (url is None):
            raise UserError(
                f"environment.options: corpus={corpus} and url={url}; a search needs one of them: a JSON-lines file of "
                "passages, or a retrieval server"
            )
        self.corpus, self.url, self.topk, self.timeout_s = corpus, url, topk, timeout_s
        self.answer: Any = None
        self._retriever: Retriever | None = None

    async def reset(self, task: Task) -> Sequence[Message] | None:
        self.answer = task.answer
        self._retriever = await open_retriever(self.corpus, self.url, self.timeout_s)
        return None

    async def find(self, query: str) -> str:
        """Return the passages that are found for the query, as text."""
        assert self._retriever is not None, "reset comes first"
        return as_text(await self._retriever.retrieve(query, self.topk))

    async def close(self) -> None:
        if self._retriever is not None:
            await self._retriever.close()


class SearchEnvironment(_Searching):
    """Searches where a turn has `<search>query</search>`, and ends with `<answer>…</answer>`: 1 if that matches, else
    0. The first of them counts: set rollout.stop=["</search>", "</answer>"] so that a turn ends there."""

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        topk: int = 3,
        timeout_s: float = 30.0,
        instructions: bool = True,
        inline: bool = True,
    ):
        """The options of every search, and
        instructions   whether the question begins with INSTRUCTIONS
        inline         whether what is found goes on in the policy's own message, as in the paper; else it is one of the
                       user
        """
        super().__init__(corpus, url, topk, timeout_s)
        self.instructions, self.inline = instructions, inline

    async def reset(self, task: Task) -> Sequence[Message] | None:
        await super().reset(task)
        if not self.instructions or not task.messages:
            return None
        *before, question = task.messages
        return [*before, {**question, "content": INSTRUCTIONS + question["content"]}]

    async def step(self, turn: Turn) -> Step:
        found = _ACTION.search(turn.text)
        if found is None:
            return self._answered(NO_ACTION)
        action, text = found[1], found[2].strip()
        if action == "answer":
            return Step(reward=exact_match(text, self.answer), done=True)
        return self._answered(f"<information>{await self.find(text)}</information>")

    def _answered(self, text: str) -> Step:
        return Step(f"\n\n{text}\n\n" if self.inline else text, reward=0.0, as_is=self.inline)


class SearchToolEnvironment(_Searching):
    """Searches by a tool. The turn that does not call it is the answer: all of it, or what is between `<answer>` and
    `</answer>` in it."""

    @tool
    async def search(self, query: str) -> str:
        """Returns the passages that fit a query best.

        query: what to search for
        """
        return await self.find(query)

    async def reward(self, turn: Turn) -> float:
        """Return whether the turn is the right answer. The last turn that a rollout may have is none if it calls."""
        if turn.tool_calls:
            return 0.0
        answers = _ANSWER.findall(turn.text)
        return exact_match(answers[-1] if answers else turn.text, self.answer)


def as_text(passages: Sequence[str]) -> str:
    """Return passages, each with its title in its first line, as the model reads them."""
    texts = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.partition("\n")
        texts.append(f"Doc {number}(Title: {title}) {text}".rstrip())
    return "\n".join(texts)


def exact_match(response: str, answer: Any) -> float:
    """Return 1 if the response is the answer, or one of several, but for case, punctuation, articles and spaces.

    answer  one, a list of several, or {"target": …}, as the data sets of Search-R1 have it
    """
    if isinstance(answer, Mapping):
        answer = answer["target"]
    if answer is None:
        raise ValueError("the row has no answer (null); a search needs one to compare with")
    answers = [str(one) for one in answer] if isinstance(answer, list | tuple) else [str(answer)]
    return float(normalise(response) in map(normalise, answers))


def normalise(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", text).split())
