"""Turns that one process samples in the engine of another, in batches: a call between two processes costs more than all
else that a turn needs.

The process that makes rollouts has one call under way at a time. Turns that get ready meanwhile go with the next one.
The engine answers when turns have ended, with all of them, and else after TICK_S, so that the next call can come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import count

from megarl.core.types import Completion
from megarl.rollout.engine import Engine, TurnRequest

TICK_S = 0.01
"""How long a turn that is ready may wait for its call, beside the step that the engine is in."""

Turns = Mapping[int, TurnRequest]
"""Turns to sample, each by a number that it is known by to both processes."""


class EngineTurns:
    """The turns that an engine samples for one other process."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._under_way: dict[int, asyncio.Future[Completion]] = {}
        self._ended: dict[int, asyncio.Future[Completion]] = {}
        self._any_ended = asyncio.Event()

    async def exchange(self, turns: Turns, abandoned: Collection[int]) -> dict[int, Completion]:
        """Begins turns, and ends the work on those that nobody waits for any more. Returns those that have ended since
        the last call. Raises the error of one that has failed."""
        for number in abandoned:
            if number in self._under_way:
                self._under_way[number].cancel()
        for number, request in turns.items():
            self._under_way[number] = self._engine.begin(request)
            self._under_way[number].add_done_callback(partial(self._end, number))
        if turns or not abandoned:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._any_ended.wait()
        ended, self._ended = self._ended, {}
        self._any_ended.clear()
        return {number: completion.result() for number, completion in ended.items()}

    def _end(self, number: int, completion: asyncio.Future[Completion]) -> None:
        del self._under_way[number]
        if not completion.cancelled():
            self._ended[number] = completion
            self._any_ended.set()


class RemoteTurns:
    """The turns of this process in an engine of another one."""

    def __init__(self, exchange: Callable[[Turns, Collection[int]], Awaitable[Mapping[int, Completion]]]):
        """exchange: calls EngineTurns.exchange in the engine's process."""
        self._exchange = exchange
        self._numbers = count()
        self._ready: dict[int, TurnRequest] = {}
        """Turns that the engine does not have yet."""
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._abandoned: list[int] = []
        """Turns that the engine may work on, and nobody waits for."""
        self._exchanging: asyncio.Task[None] | None = None

    async def sample(self, request: TurnRequest) -> Completion:
        """Returns a turn's tokens. Raises what the call raises that it would have come with. Who cancels it ends the
        work on it."""
        number, completion = next(self._numbers), asyncio.get_running_loop().create_future()
        self._ready[number], self._waiting[number] = request, completion
        self._begin_to_exchange()
        try:
            return await completion
        finally:
            if self._waiting.pop(number, None) is not None and self._ready.pop(number, None) is None:
                self._abandoned.append(number)
                self._begin_to_exchange()

    async def end_abandoned(self) -> None:
        """Waits until the engine works on none that nobody waits for: it may be put to sleep then."""
        while self._abandoned:
            await asyncio.sleep(TICK_S)

    def _begin_to_exchange(self) -> None:
        if self._exchanging is None:
            self._exchanging = asyncio.create_task(self._exchange_while_waiting())

    async def _exchange_while_waiting(self) -> None:
        try:
            while self._waiting or self._abandoned:
                ready, self._ready = self._ready, {}
                abandoned = [*self._abandoned]
                for number, completion in (await self._exchange(ready, abandoned)).items():
                    waiting = self._waiting.pop(number, None)
                    if waiting is not None and not waiting.done():  # else its rollout has ended
                        waiting.set_result(completion)
                del self._abandoned[: len(abandoned)]
        except Exception as error:  # of the engine, or of its process, for those who wait
            waiting, self._waiting, self._ready = self._waiting, {}, {}
            self._abandoned.clear()
            for completion in waiting.values():
                if not completion.done():
                    completion.set_exception(error)
        finally:
            self._exchanging = None
