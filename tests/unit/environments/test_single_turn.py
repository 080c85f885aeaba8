"""A task of one turn, which reward functions judge."""

import asyncio
from concurrent.futures import Future

from megarl.core.types import Prompt
from megarl.environments.protocol import Step, Turn
from megarl.environments.single_turn import SingleTurn
from megarl.rewards.result import Result


class Calls:
    """Stands in for a FunctionPool: no call ends before all have begun."""

    def __init__(self) -> None:
        self.begun: list[tuple] = []
        self._futures: list[Future[Result]] = []

    def call(self, *call, columns: dict) -> Future[Result]:
        self.begun.append((*call, columns))
        self._futures.append(Future())
        if len(self.begun) == 2:
            for number, future in enumerate(self._futures):
                future.set_result(Result(float(number)))
        return self._futures[-1]


def test_one_turn_ends_the_rollout_and_all_functions_judge_it():
    calls = Calls()
    environment = SingleTurn(calls, ["first", "second"])

    async def rollout() -> Step:
        prompt = Prompt("p", "7+5?", [1, 2], answer="12", columns={"level": 3})
        assert await environment.reset(prompt) is prompt
        return await environment.step(Turn([3], "12", "stop"))

    step = asyncio.run(rollout())
    assert step == Step({"first": Result(0.0), "second": Result(1.0)}) and step.messages is None
    assert calls.begun == [(name, "7+5?", "12", "12", {"level": 3}) for name in ("first", "second")]
