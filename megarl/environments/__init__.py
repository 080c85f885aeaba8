"""What a policy acts in: the protocol of environments, their tools, and the processes that run users' code."""

from megarl.environments.protocol import Environment, Opening, Step, StopReason, Task, Turn
from megarl.environments.tools import MalformedCall, ToolCall, tool

__all__ = ["Environment", "MalformedCall", "Opening", "Step", "StopReason", "Task", "ToolCall", "Turn", "tool"]
