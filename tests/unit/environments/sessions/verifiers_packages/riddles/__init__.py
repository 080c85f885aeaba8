from riddles.taskset import RiddlesTaskset

__all__ = ["RiddlesTaskset"]
