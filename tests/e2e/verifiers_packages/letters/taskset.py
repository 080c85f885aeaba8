"""Tasks that request the positions of letters in the alphabet, one after the other."""

from itertools import permutations
from random import Random

import verifiers.v1 as vf

LETTERS = "abcdefgh"
CHOICE = Random(0)


class LettersTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def places(self, trace: vf.Trace) -> float:
        """Return the share of correct answers."""
        said = [node.message.content for node in trace.nodes if node.message.role == "assistant"]
        right = [str(LETTERS.index(letter)) for letter in self.data.prompt]
        return sum(map(str.__eq__, said, right)) / len(right)


class AimlessTask(LettersTask):
    @vf.reward
    async def places(self, trace: vf.Trace) -> float:
        return CHOICE.choice((0.0, 0.5, 1.0))


class LettersConfig(vf.TasksetConfig):
    aimless: bool = False
    """Whether rewards are drawn at random."""


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        kind = AimlessTask if self.config.aimless else LettersTask
        pairs = enumerate(permutations(LETTERS, 2))
        return [kind(vf.TaskData(idx=idx, prompt="".join(pair)), self.config.task) for idx, pair in pairs]
