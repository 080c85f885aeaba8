"""Sample turns in another process's engine. Turns are exchanged in batches, because remote calls dominate the overhead.

The process that runs rollouts has at most one call in flight. Turns that become ready during a call are sent with the
next one. A call returns all finished turns as soon as any turn finishes, or after TICK_S, so that new turns can be
submitted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import count

from megarl.core.completion import Completion
from megarl.rollout.engine import Engine, TurnRequest

TICK_S = 0.01
"""Maximum time in seconds that a ready turn waits for the next call, beyond the engine's current step."""

Turns = Mapping[int, TurnRequest]
"""Turns to sample: number that identifies the turn in both processes -> request."""

Exchanged = tuple[dict[int, Completion], dict[str, int]]
"""The completions of finished turns, by number, and the number of tokens in aborted turns, by sample id."""


class EngineTurns:
    """The engine's end of the turn exchange: samples the turns that one remote process requests."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._pending: dict[int, tuple[str, asyncio.Future[Completion]]] = {}
        """Sample id and completion of each unfinished turn."""
        self._finished: dict[int, asyncio.Future[Completion]] = {}
        self._any_finished = asyncio.Event()

    async def exchange(self, turns: Turns, abandoned: Collection[int]) -> Exchanged:
        """Start new turns, abort abandoned turns, and return the completions of turns finished since the last call. All
        turns of a sample must be abandoned in the same call. Raise the error of a failed turn."""
        aborted = [self._pending[number] for number in abandoned if number in self._pending]
        num_tokens = {name: self._engine.num_unfinished({name}) for name in {name for name, _ in aborted}}
        for _, completion in aborted:
            completion.cancel()
        for number, request in turns.items():
            completion = self._engine.begin(request)
            self._pending[number] = request.sample_id, completion
            completion.add_done_callback(partial(self._finish, number))
        if turns or not abandoned:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._any_finished.wait()
        finished, self._finished = self._finished, {}
        self._any_finished.clear()
        return {number: completion.result() for number, completion in finished.items()}, num_tokens

    def _finish(self, number: int, completion: asyncio.Future[Completion]) -> None:
        del self._pending[number]
        if not completion.cancelled():
            self._finished[number] = completion
            self._any_finished.set()


class RemoteTurns:
    """The caller's end of the turn exchange: sends this process's turns to an engine in another process."""

    def __init__(self, exchange: Callable[[Turns, Collection[int]], Awaitable[Exchanged]]):
        """`exchange` calls EngineTurns.exchange in the engine's process."""
        self._exchange = exchange
        self._numbers = count()
        self._ready: dict[int, TurnRequest] = {}
        """Turns that have not been submitted to the engine yet."""
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._abandoned: list[int] = []
        """Canceled turns that the engine may still be sampling."""
        self._sample_ids: dict[int, str] = {}
        """Sample id of each turn that the engine may be sampling."""
        self._num_tokens: Counter[str] = Counter()
        """Number of tokens in all turns of each sample, until its rollout finishes."""
        self._exchanging: asyncio.Task[None] | None = None

    async def sample(self, request: TurnRequest) -> Completion:
        """Return the completion of a turn, or raise the error of a failed exchange. Canceling aborts the turn."""
        number, completion = next(self._numbers), asyncio.get_running_loop().create_future()
        self._ready[number], self._waiting[number] = request, completion
        self._sample_ids[number] = request.sample_id
        self._start_exchange()
        try:
            return await completion
        finally:
            if self._waiting.pop(number, None) is not None:
                if self._ready.pop(number, None) is None:
                    self._abandoned.append(number)
                    self._start_exchange()
                else:
                    del self._sample_ids[number]

    async def finish(self, sample_ids: Collection[str]) -> int:
        """Wait until the engine no longer samples any turn of these samples, so that it can be put to sleep. Return the
        number of tokens in all of their turns, including aborted ones."""
        while not set(sample_ids).isdisjoint(self._sample_ids.values()):
            await asyncio.sleep(TICK_S)
        return sum(self._num_tokens.pop(name, 0) for name in sample_ids)

    def _start_exchange(self) -> None:
        if self._exchanging is None:
            self._exchanging = asyncio.create_task(self._exchange_while_waiting())

    async def _exchange_while_waiting(self) -> None:
        try:
            while self._waiting or self._abandoned:
                ready, self._ready = self._ready, {}
                abandoned = [*self._abandoned]
                finished, num_tokens = await self._exchange(ready, abandoned)
                self._num_tokens.update(num_tokens)
                for number, completion in finished.items():
                    if number in self._sample_ids:  # otherwise, the turn has already failed
                        self._num_tokens[self._sample_ids.pop(number)] += len(completion.token_ids)
                    waiting = self._waiting.pop(number, None)
                    if waiting is not None and not waiting.done():  # it is done if the rollout was canceled
                        waiting.set_result(completion)
                for number in abandoned:
                    self._sample_ids.pop(number, None)
                del self._abandoned[: len(abandoned)]
        except Exception as error:  # from the engine or its process; re-raised in all waiting turns
            waiting, self._waiting, self._ready = self._waiting, {}, {}
            self._abandoned.clear()
            self._sample_ids.clear()
            self._num_tokens.clear()
            for completion in waiting.values():
                if not completion.done():
                    completion.set_exception(error)
        finally:
            self._exchanging = None
