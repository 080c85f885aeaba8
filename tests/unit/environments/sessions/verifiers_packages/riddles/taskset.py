"""An environment written as the verifiers documentation describes: tasks, a tool server and rewards."""

import verifiers.v1 as vf

from riddles.tool import CoatToolset

WORDS = ["amber", "birch", "cedar"]


class RiddleData(vf.TaskData):
    answer: str


class RiddleTask(vf.Task[RiddleData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def finds_the_word(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.nodes[-1].message.content or ""))

    @vf.reward
    async def looks_first(self, trace: vf.Trace) -> float:
        return 0.5 if trace.num_turns > 1 else 0.0


class RiddlesTaskset(vf.Taskset[RiddleTask, vf.TasksetConfig]):
    def load(self) -> list[RiddleTask]:
        return [
            RiddleTask(RiddleData(prompt=f"Coat {place} has a word in its pocket.", answer=word), self.config.task)
            for place, word in enumerate(WORDS)
        ]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [CoatToolset(vf.SharedToolsetConfig())]
