"""Turns between the process that makes rollouts and the engine's: which calls they need, and what becomes of each."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from megarl.core.types import Completion, VersionRun
from megarl.rollout.engine import TurnRequest
from megarl.rollout.turns import EngineTurns, RemoteTurns


@dataclass
class Engine:
    """Completes what the test tells it to. Its turns are known by their seeds."""

    under_way: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        self.under_way[request.seed] = asyncio.get_running_loop().create_future()
        return self.under_way[request.seed]

    def complete(self, *seeds: int) -> None:
        for seed in seeds:
            self.under_way[seed].set_result(Completion([seed], [-1.0], (VersionRun(1, 1),), "stop"))


def request(seed: int) -> TurnRequest:
    return TurnRequest(np.array([1, 2], np.int32), max_new_tokens=4, seed=seed)


class Line:
    """Both ends, and the calls between them."""

    def __init__(self) -> None:
        self.engine = Engine()
        ends = EngineTurns(self.engine)
        self.calls: list[list[int]] = []

        async def exchange(turns, abandoned):
            self.calls.append([turn.seed for turn in turns.values()])
            return await ends.exchange(turns, abandoned)

        self.turns = RemoteTurns(exchange)

    def sample(self, seed: int) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.turns.sample(request(seed)))

    async def begun(self, *seeds: int) -> None:
        async with asyncio.timeout(5):
            while not self.engine.under_way.keys() >= set(seeds):
                await asyncio.sleep(0.001)


def play(test) -> None:
    asyncio.run(test(Line()))


def test_turns_that_are_ready_together_go_in_one_call_and_each_gets_its_own_tokens():
    async def test(line: Line) -> None:
        turns = [line.sample(seed) for seed in range(100)]
        await line.begun(*range(100))
        assert line.calls[0] == list(range(100))
        assert sum(map(len, line.calls)) == 100
        line.engine.complete(*reversed(range(100)))
        assert [turn.token_ids.tolist() for turn in await asyncio.gather(*turns)] == [[seed] for seed in range(100)]

    play(test)


def test_a_turn_that_gets_ready_later_neither_waits_for_the_others_nor_holds_them():
    async def test(line: Line) -> None:
        slow = line.sample(1)
        await line.begun(1)
        quick = line.sample(2)
        await line.begun(2)
        line.engine.complete(2)
        assert (await quick).token_ids.tolist() == [2]
        assert not slow.done()
        line.engine.complete(1)
        assert (await slow).token_ids.tolist() == [1]

    play(test)


def test_a_turn_that_nobody_waits_for_is_ended_in_the_engine_too():
    """The first of them has not reached it yet."""

    async def test(line: Line) -> None:
        other = line.sample(3)
        await line.begun(3)
        abandoned = [line.sample(seed) for seed in (1, 2)]
        await asyncio.sleep(0)
        abandoned[0].cancel()
        await line.begun(2)
        abandoned[1].cancel()
        await asyncio.wait(abandoned)
        await line.turns.end_abandoned()
        assert line.engine.under_way[2].cancelled() and 1 not in line.engine.under_way
        line.engine.complete(3)
        assert (await other).token_ids.tolist() == [3]
        assert not line.turns._waiting

    play(test)


def test_there_are_no_calls_without_turns():
    async def test(line: Line) -> None:
        turn = line.sample(1)
        await line.begun(1)
        line.engine.complete(1)
        await turn
        num_calls = len(line.calls)
        await asyncio.sleep(0.1)
        assert len(line.calls) == num_calls

    play(test)


def test_the_engines_error_reaches_all_who_wait_and_later_turns_begin_anew():
    async def test(line: Line) -> None:
        turns = [line.sample(seed) for seed in (1, 2)]
        await line.begun(1, 2)
        line.engine.under_way[1].set_exception(ValueError("no room"))
        for turn in turns:
            with pytest.raises(ValueError, match="no room"):
                await turn
        later = line.sample(3)
        await line.begun(3)
        line.engine.complete(2, 3)  # nobody waits for the second one any more
        assert (await later).token_ids.tolist() == [3]

    play(test)


def test_a_rollout_that_has_ended_leaves_the_turns_of_others():
    async def test(line: Line) -> None:
        left, other = line.sample(1), line.sample(2)
        await line.begun(1, 2)
        left.cancel()
        line.engine.complete(1)
        await asyncio.sleep(0.05)
        line.engine.complete(2)
        assert (await other).token_ids.tolist() == [2]

    play(test)
