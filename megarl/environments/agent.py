"""The agent protocol. An agent is a program that calls the policy through an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.environments.protocol import Task


class Agent:
    """Base class for agents. A user class with a `run` method need not inherit from it. The constructor receives
    `environment.options` as keyword arguments. Each rollout gets its own instance, in a process next to the engines.
    Synchronous methods run in a thread."""

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> float | Mapping[str, float] | None:
        """Work on the task. Each request to `base_url` with `api_key` is one turn of the rollout. The agent may pass
        the URL and the key to sub-agents and other programs.

        Returns:
            The reward, or named rewards, which are summed. None leaves scoring to the reward functions, which read
            the last sample.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release the agent's resources. Called once at the end of every rollout, including one that timed out."""
