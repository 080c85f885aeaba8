"""Question answering with a search engine (Search-R1: Jin et al. 2025, arXiv 2503.09516)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.data.image_parts import join_contents
from megarl.environments.protocol import Environment, Step, Task, Turn
from megarl.environments.shipped.retrieval import Retriever, open_retriever
from megarl.environments.tools import Message, tool
from megarl.rewards.think_answer import last_answer

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

_TAG = re.compile(r"<(?P<name>search|answer)>")
_ARTICLE = re.compile(r"\b(a|an|the)\b")


class _Searching(Environment):
    """Common base class for the search environments."""

    @staticmethod
    def check_answer(answer: Any) -> None:
        exact_match("", answer)

    def __init__(self, corpus: str | None = None, url: str | None = None, topk: int = 3, timeout_s: float = 30.0):
        """
        Args:
            corpus: JSON-lines file with passages, ranked by BM25.
            url: URL of a retrieval server to use instead of `corpus`.
            topk: number of passages per query.
            timeout_s: time limit for a server request, in seconds.
        """
        if (corpus is None) == (url is None):
            raise UserError(
                f"environment.options: corpus={corpus}, url={url}: search needs exactly one of them. Fix: set corpus "
                "to a JSON-lines file of passages, or url to a retrieval server"
            )
        self.corpus, self.url, self.topk, self.timeout_s = corpus, url, topk, timeout_s
        self.answer: Any = None
        self._retriever: Retriever | None = None

    async def reset(self, task: Task) -> Sequence[Message] | None:
        self.answer = task.answer
        self._retriever = await open_retriever(self.corpus, self.url, self.timeout_s)
        return None

    async def find(self, query: str) -> str:
        """Return the passages for the query as text."""
        assert self._retriever is not None, "reset has not been called"
        return as_text(await self._retriever.retrieve(query, self.topk))

    async def close(self) -> None:
        if self._retriever is not None:
            await self._retriever.close()


class SearchEnvironment(_Searching):
    """Question answering with search tags. `<search>query</search>` runs a search. `<answer>…</answer>` ends the
    rollout with reward 1 if it matches the reference answer, else 0. Only the first tag in a turn counts, so set
    rollout.stop=["</search>", "</answer>"] to end the turn there."""

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        topk: int = 3,
        timeout_s: float = 30.0,
        instructions: bool = True,
        inline: bool = True,
    ):
        """
        Args:
            corpus, url, topk, timeout_s: see the base class.
            instructions: prepend INSTRUCTIONS to the question.
            inline: append the passages to the policy's own message, as in the paper. False: send a user message.
        """
        super().__init__(corpus, url, topk, timeout_s)
        self.instructions, self.inline = instructions, inline

    async def reset(self, task: Task) -> Sequence[Message] | None:
        await super().reset(task)
        if not self.instructions or not task.messages:
            return None
        *context, question = task.messages
        return [*context, {**question, "content": join_contents(INSTRUCTIONS, question["content"])}]

    async def step(self, turn: Turn) -> Step:
        action, text = first_action(turn.text)
        if action is None:
            return self._observe(NO_ACTION)
        if action == "answer":
            return Step(reward=exact_match(text, self.answer), done=True)
        return self._observe(f"<information>{await self.find(text)}</information>")

    def _observe(self, text: str) -> Step:
        return Step(f"\n\n{text}\n\n" if self.inline else text, reward=0.0, as_is=self.inline)


class SearchToolEnvironment(_Searching):
    """Question answering with a `search` tool. The first turn without a tool call is the answer: its last
    `<answer>…</answer>`, or the whole text if there is none."""

    @tool
    async def search(self, query: str) -> str:
        """Returns the passages that fit a query best.

        query: what to search for
        """
        return await self.find(query)

    async def reward(self, turn: Turn) -> float:
        """Return 1 if the turn is the correct answer, else 0. A last turn that still calls a tool is not an answer."""
        if turn.tool_calls:
            return 0.0
        answer = last_answer(turn.text)
        return exact_match(turn.text if answer is None else answer, self.answer)


def first_action(text: str) -> tuple[str | None, str]:
    """Return the name and the content of the first closed tag, or None and "" if there is none. Takes linear time, even
    if the text repeats an opening tag without closing it."""
    ends = {name: text.rfind(f"</{name}>") for name in ("search", "answer")}
    for tag in _TAG.finditer(text):
        if tag.end() <= ends[tag["name"]]:
            stop = text.find(f"</{tag['name']}>", tag.end())
            return tag["name"], text[tag.end() : stop].strip()
    return None, ""


def as_text(passages: Sequence[str]) -> str:
    """Return the passages as one text for the model. The first line of each passage is its title."""
    texts = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.partition("\n")
        texts.append(f"Doc {number}(Title: {title}) {text}".rstrip())
    return "\n".join(texts)


def exact_match(response: str, answer: Any) -> float:
    """Return 1 if the response equals an answer up to case, punctuation, articles and whitespace, else 0. The answer is
    a string, a list of alternatives, or {"target": …} as in the Search-R1 datasets."""
    if isinstance(answer, Mapping):
        answer = answer.get("target")
    if answer is None:
        raise ValueError("answer=null: the row has no answer to compare with. Fix: add one to the data")
    answers = [str(item) for item in answer] if isinstance(answer, list | tuple) else [str(answer)]
    return float(normalize(response) in map(normalize, answers))


def normalize(text: str) -> str:
    """Convert the text to lower case and remove punctuation and articles, unless nothing would remain."""
    lower = text.lower()
    words = "".join(character for character in lower if character not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", words).split()) or lower.strip()
