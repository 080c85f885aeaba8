"""The protocol of agents: programs of their own that reach the policy by the OpenAI API, at a URL that they get."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.environments.protocol import Task


class Agent:
    """The base of agents. A class of a user's file with a method `run` may do without it.

    `environment.options` are the keyword arguments of its class. There is an object of its own for each rollout, in a
    process beside the engines; a method that is not async runs in a thread.
    """

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> float | Mapping[str, float] | None:
        """Works on the task. Every request to the endpoint of this URL and key is a turn of the rollout; whoever gets
        them, a sub-agent or a program, may send some.

        Returns the reward, or rewards by name, whose sum it is; None: reward functions read the last sample.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Gives back what the agent holds. It is called once, at the end of every rollout, also of one whose time is
        over."""
