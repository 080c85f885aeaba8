"""Passage retrieval from a local file or a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from megarl.core.errors import UserError
from megarl.core.files import parse_json
from megarl.core.text import encodable
from megarl.usercode.failures import ServiceUnavailable

CORPUS = "environment.options.corpus"

UNAVAILABLE = (429, 502, 503, 504)
"""HTTP status codes that mean the server is overloaded or restarting."""

_LOADING = threading.Lock()


class Retriever(Protocol):
    async def retrieve(self, query: str, topk: int) -> list[str]:
        """Return the `topk` best passages for the query, best first."""
        ...

    async def close(self) -> None: ...


class Corpus:
    """Passages from a JSON-lines file, ranked by BM25.

    Each row has either `contents`, whose first line is the title, or `title` and `text`.
    """

    def __init__(self, path: Path):
        import bm25s

        self.passages = _read(path)
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(self._tokens(self.passages), show_progress=False)

    def _tokens(self, texts: Sequence[str]) -> Any:
        # Keep one-letter words, because in a small corpus they may be the only difference between two passages.
        return self._tokenize(list(texts), token_pattern=r"(?u)\b\w+\b", stopwords="en", show_progress=False)

    async def retrieve(self, query: str, topk: int) -> list[str]:
        return await asyncio.to_thread(self._best, query, topk)

    def _best(self, query: str, topk: int) -> list[str]:
        indices, scores = self._index.retrieve(
            self._tokens([query]), k=min(topk, len(self.passages)), show_progress=False
        )
        return [self.passages[i] for i, score in zip(indices[0], scores[0], strict=True) if score > 0]

    async def close(self) -> None:
        """Do nothing: other rollouts in the process share the index."""


async def open_retriever(path: str | None, url: str | None, timeout_s: float) -> Retriever:
    """Return a retriever for a corpus file, shared by all rollouts in the process, or for a server."""
    if url is not None:
        return Server(url, timeout_s)
    assert path is not None, "a search environment has a corpus or a server"
    return await asyncio.to_thread(_corpus, path)


def _corpus(path: str) -> Corpus:
    with _LOADING:  # only the first of several concurrent rollouts reads the file
        return _loaded(path)


@lru_cache(maxsize=4)
def _loaded(path: str) -> Corpus:
    return Corpus(Path(path).expanduser())


def _read(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"{CORPUS}={path}: not a file. Fix: set {CORPUS} to a JSON-lines file of passages")
    passages = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(
                    f"{CORPUS}={path}: line {number} is not valid JSON ({error}). Fix: write one JSON object per line"
                ) from None
            fields = ("contents",) if isinstance(row, dict) and "contents" in row else ("title", "text")
            if not isinstance(row, dict) or not all(isinstance(row.get(field), str) for field in fields):
                raise UserError(
                    f"{CORPUS}={path}: line {number} has no passage. Fix: write a JSON object with `contents`, or with "
                    "`title` and `text`"
                )
            passages.append(encodable("\n".join(row[field] for field in fields)))
    if not passages:
        raise UserError(f"{CORPUS}={path}: the file is empty. Fix: add at least one passage")
    return passages


class Server:
    """A retrieval server that uses the Search-R1 protocol (arXiv 2503.09516).

    The request is POST /retrieve {"queries": […], "topk": k, "return_scores": true}. The response {"result": [[…]]}
    has a list of {"document": {"contents": …}, "score": …} for each query.
    """

    def __init__(self, url: str, timeout_s: float):
        """`url`: URL of the server or of its `/retrieve` endpoint."""
        self.url = url if url.rstrip("/").endswith("/retrieve") else f"{url.rstrip('/')}/retrieve"
        self.timeout_s = timeout_s
        self._session: Any = None

    async def retrieve(self, query: str, topk: int) -> list[str]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.timeout_s))
        body = {"queries": [query], "topk": topk, "return_scores": True}
        try:
            async with self._session.post(self.url, json=body) as response:
                if response.status in UNAVAILABLE:
                    raise ServiceUnavailable(f"{self.url} returned status {response.status}")
                response.raise_for_status()
                [items] = (await response.json())["result"]
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise ServiceUnavailable(f"{self.url}: {type(error).__name__}: {error}") from error
        return [item["document"]["contents"] for item in items]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
