"""Run an engine's requests in steps between which the event loop executes other calls."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")

ROUNDS_PER_STEP = 2
"""Number of event-loop iterations between two engine steps. In the first, the tasks that await results resume; in the
second, their callers do."""

PAUSE_S = 0.05
"""Seconds between checks of whether an engine that is paused or has no valid weights may step again."""


class SteppedEngine(ABC, Generic[Request, Result]):
    """An engine that advances all pending requests step by step. All calls must come from the event loop of one thread.
    A call that arrives during sampling is executed between two steps."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._is_paused = False
        self._seconds, self._seconds_until = 0.0, 0.0
        """Time spent sampling in seconds since the last `take_work`, and the timestamp up to which it is counted."""
        self._num_steps = 0
        """Number of steps since the last `take_work`."""

    @property
    @abstractmethod
    def _futures(self) -> Iterable[asyncio.Future[Any]]:
        """The futures of all pending requests."""

    @abstractmethod
    def _step(self) -> None:
        """Advance the pending requests by one step, and set the results of those that have finished."""

    @abstractmethod
    def _wake(self) -> None:
        """Restore the device memory that a step needs."""

    @abstractmethod
    async def _complete(self, request: Request) -> Result:
        """Return the result of one request."""

    def take_work(self) -> tuple[float, int]:
        """Return the time spent sampling in seconds, without pauses, and the number of steps, since the last call."""
        work = self._seconds, self._num_steps
        self._seconds, self._num_steps = 0.0, 0
        return work

    async def generate(
        self, requests: Sequence[Request], finished: Callable[[list[Result]], object] = lambda _: None
    ) -> list[Result]:
        """Return results in the order of the requests, and pass newly finished results to `finished` as they arrive.
        Raise a RuntimeError if the engine has no weights and is not paused."""
        new: list[Result] = []

        def report() -> None:
            finished([*new])
            new.clear()

        async def complete(request: Request) -> Result:
            result = await self._complete(request)
            if not new:  # report all results of a step together
                asyncio.get_running_loop().call_soon(report)
            new.append(result)
            return result

        self._require_weights()
        return await asyncio.gather(*map(complete, requests))

    def resume(self) -> None:
        self._is_paused = False
        if any(True for _ in self._futures):
            self._wake()

    def _require_weights(self) -> None:
        if self.version is None and not self._is_paused:
            raise RuntimeError("the engine has no weights yet. Fix: refit it before it generates")

    def _ensure_stepping(self) -> None:
        """Start stepping unless it is already running."""
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_while_pending())

    async def _step_while_pending(self) -> None:
        """Step until all requests have completed. If a step fails, all requests fail."""
        self._seconds_until = time.monotonic()
        try:
            while not all(future.done() for future in self._futures):
                if self._may_step:
                    self._step()
                    now = time.monotonic()
                    self._seconds, self._seconds_until = self._seconds + now - self._seconds_until, now
                    self._num_steps += 1
                await self._yield_to_callers()
        except Exception as error:  # from the engine's library; re-raised in all waiting callers
            for future in self._futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._stepping = None

    @property
    def _may_step(self) -> bool:
        return self.version is not None and not self._is_paused

    async def _yield_to_callers(self) -> None:
        """Let callers process the results of a step before the next one starts."""
        for _ in range(ROUNDS_PER_STEP):
            await asyncio.sleep(0)
        if not self._may_step:
            await asyncio.sleep(PAUSE_S)
            self._seconds_until = time.monotonic()
