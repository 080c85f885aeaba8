from letters.harness import LettersHarness
from letters.taskset import LettersTaskset

__all__ = ["LettersHarness", "LettersTaskset"]
