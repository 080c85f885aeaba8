"""Environments and agents: their protocols, their tools, and the processes that run user code."""

from megarl.environments.protocol import Agent, Environment, Opening, Reward, Step, StopReason, Task, Turn
from megarl.environments.tools import MalformedCall, ToolCall, tool

__all__ = [
    "Agent",
    "Environment",
    "MalformedCall",
    "Opening",
    "Reward",
    "Step",
    "StopReason",
    "Task",
    "ToolCall",
    "Turn",
    "tool",
]
