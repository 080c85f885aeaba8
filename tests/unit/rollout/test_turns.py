"""Sampling of turns in the engine of another process: batching, cancellation and errors."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest

from megarl.core.completion import Completion, VersionRun
from megarl.rollout.engine import TurnRequest
from megarl.rollout.turns import EngineTurns, RemoteTurns
from tests.timing import WAIT_S


@dataclass
class Engine:
    """A fake engine that completes turns on request; turns are identified by their seeds."""

    pending: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        self.pending[request.seed] = asyncio.get_running_loop().create_future()
        return self.pending[request.seed]

    def num_unfinished(self, sample_ids: Collection[str]) -> int:
        return sum(seed for seed in self.pending if f"sample {seed}" in sample_ids)

    def complete(self, *seeds: int) -> None:
        for seed in seeds:
            self.pending[seed].set_result(Completion([seed], [-1.0], (VersionRun(1, 1),), "stop"))


def request(seed: int) -> TurnRequest:
    return TurnRequest(np.array([1, 2], np.int32), sample_id=f"sample {seed}", max_new_tokens=4, seed=seed)


class Connection:
    """Both ends of a connection, with a record of the calls between them."""

    def __init__(self) -> None:
        self.engine = Engine()
        engine_turns = EngineTurns(self.engine)
        self.calls: list[list[int]] = []

        async def exchange(turns, abandoned):
            self.calls.append([turn.seed for turn in turns.values()])
            return await engine_turns.exchange(turns, abandoned)

        self.turns = RemoteTurns(exchange)

    def sample(self, seed: int) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.turns.sample(request(seed)))

    async def wait_until_started(self, *seeds: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.engine.pending.keys() >= set(seeds):
                await asyncio.sleep(0.001)


def run(test) -> None:
    asyncio.run(test(Connection()))


def test_turns_ready_together_share_one_call():
    async def test(connection: Connection) -> None:
        turns = [connection.sample(seed) for seed in range(100)]
        await connection.wait_until_started(*range(100))
        assert connection.calls[0] == list(range(100))
        assert sum(map(len, connection.calls)) == 100
        connection.engine.complete(*reversed(range(100)))
        assert [turn.token_ids.tolist() for turn in await asyncio.gather(*turns)] == [[seed] for seed in range(100)]

    run(test)


def test_later_turn_neither_waits_for_nor_delays_others():
    async def test(connection: Connection) -> None:
        slow = connection.sample(1)
        await connection.wait_until_started(1)
        quick = connection.sample(2)
        await connection.wait_until_started(2)
        connection.engine.complete(2)
        assert (await quick).token_ids.tolist() == [2]
        assert not slow.done()
        connection.engine.complete(1)
        assert (await slow).token_ids.tolist() == [1]

    run(test)


def test_canceled_turns_are_aborted_in_the_engine():
    """The first canceled turn has not been submitted to the engine yet."""

    async def test(connection: Connection) -> None:
        other = connection.sample(3)
        await connection.wait_until_started(3)
        abandoned = [connection.sample(seed) for seed in (1, 2)]
        await asyncio.sleep(0)
        abandoned[0].cancel()
        await connection.wait_until_started(2)
        abandoned[1].cancel()
        await asyncio.wait(abandoned)
        assert await connection.turns.finish(["sample 1", "sample 2"]) == 2, "one token per seed"
        assert connection.engine.pending[2].cancelled() and 1 not in connection.engine.pending
        connection.engine.complete(3)
        assert (await other).token_ids.tolist() == [3]
        assert await connection.turns.finish(["sample 3"]) == 1
        assert not connection.turns._waiting and not connection.turns._sample_ids and not connection.turns._num_tokens

    run(test)


def test_no_calls_are_made_without_turns():
    async def test(connection: Connection) -> None:
        turn = connection.sample(1)
        await connection.wait_until_started(1)
        connection.engine.complete(1)
        await turn
        num_calls = len(connection.calls)
        await asyncio.sleep(0.1)
        assert len(connection.calls) == num_calls

    run(test)


def test_engine_error_fails_waiting_turns_only():
    async def test(connection: Connection) -> None:
        turns = [connection.sample(seed) for seed in (1, 2)]
        await connection.wait_until_started(1, 2)
        connection.engine.pending[1].set_exception(ValueError("no room"))
        for turn in turns:
            with pytest.raises(ValueError, match="no room"):
                await turn
        later = connection.sample(3)
        await connection.wait_until_started(3)
        connection.engine.complete(2, 3)  # turn 2 has already failed
        assert (await later).token_ids.tolist() == [3]

    run(test)


def test_canceled_turn_does_not_affect_others():
    async def test(connection: Connection) -> None:
        left, other = connection.sample(1), connection.sample(2)
        await connection.wait_until_started(1, 2)
        left.cancel()
        connection.engine.complete(1)
        await asyncio.sleep(0.05)
        connection.engine.complete(2)
        assert (await other).token_ids.tolist() == [2]

    run(test)
