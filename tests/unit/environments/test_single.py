"""Calls of reward functions for single samples."""

import asyncio
from concurrent.futures import Future

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.environments.batch import judge_single
from megarl.rewards.result import Result


class Calls:
    """A fake FunctionPool in which no call finishes before all have started."""

    def __init__(self) -> None:
        self.begun: list[tuple] = []
        self._futures: list[Future[Result]] = []

    def judges(self, function: str, prompt: Prompt) -> bool:
        return function != "other"

    def call(self, *call, columns: dict) -> Future[Result]:
        self.begun.append((*call, columns))
        self._futures.append(Future())
        if len(self.begun) == 2:
            for number, future in enumerate(self._futures):
                future.set_result(Result(float(number)))
        return self._futures[-1]


def test_functions_judge_a_sample_concurrently():
    calls = Calls()
    prompt = Prompt("p", "7+5?", [1, 2], answer="12", columns={"level": 3})
    sample = Sample("s", prompt, [3], [0.0], [True], (VersionRun(0, 1),), "stop", "12")
    results = asyncio.run(judge_single(calls, ["first", "other", "second"], sample))
    assert results == {"first": Result(0.0), "second": Result(1.0)}
    columns = {"level": 3, "prompt_image_files": (), "num_response_tokens": 1}
    assert calls.begun == [(name, "7+5?", "12", "12", columns) for name in ("first", "second")]
