"""Protocols for user code: an environment responds to each turn of the policy; an agent calls the policy itself.

Each rollout gets its own instance, in a process next to the engines. Methods may be async. Synchronous methods run in a
thread so that they do not block other instances in the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from megarl.core.completion import FinishReason
from megarl.core.episode import FAILED, LOST
from megarl.environments.tools import MalformedCall, Message, Toolbox, ToolCall, run


class StopReason(StrEnum):
    """The reason why a rollout ended."""

    DONE = "done"
    """The environment returned done=True, or the agent returned."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The token limit leaves no room for another turn or for the observation, or the observation is longer than
    environment.observation_tokens and environment.overlong_observation=refuse."""
    FAILED = FAILED
    """The environment raised an error, hung, or exited its process. The rollout has no reward."""
    LOST = LOST
    """The environment's process was killed in every attempt, or a service that it needs was unavailable for too long.
    The rollout has no reward."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a rollout: one row of the data.

    Attributes:
        id: row id, shared by all rollouts in a group.
        messages: the row's prompt as a conversation, with images as data: URLs in the OpenAI API's format. Empty for
            data.source=environment.
        answer: the row's reference answer, or None.
        columns: all columns of the row.
        seed: task seed, shared by all rollouts in a group. It changes every step, but is the same in every evaluation.
    """

    id: str
    messages: Sequence[Message]
    answer: Any
    columns: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy turn.

    Attributes:
        token_ids: sampled tokens, int32 [R].
        text: decoded tokens without special tokens. For gpt-oss, only the messages to the user, without reasoning and
            tool calls.
        finish_reason: "length" if the turn was cut off at its token limit.
        tool_calls: tool calls parsed from the token ids, in order.
        number: index of the turn in the rollout, starting at 0.
        is_last: whether no turn can follow, because environment.max_turns is reached or no token budget is left.
    """

    token_ids: NDArray[np.int32]
    text: str
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall | MalformedCall, ...] = ()
    number: int = 0
    is_last: bool = False


class RewardWithFeedback(TypedDict):
    """A reward with text feedback on the rollout for teachers."""

    reward: float | Mapping[str, float] | None
    feedback: str | None


Reward = float | Mapping[str, float] | RewardWithFeedback | None
"""A number; named numbers, which are summed; either of these with feedback; or None for no reward."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's response to a turn.

    Attributes:
        observation: messages to append before the policy's next turn. Their content is text or a list of parts with
            images. A string becomes one user message. None if the rollout ends.
        reward: reward for this turn.
        done: whether the rollout ends.
        as_is: append the observation as raw text directly after the turn, not as a message. It cannot have images.
        restart: replace the conversation with the observation, which must be a complete conversation. The turns that
            follow become a separate sample. Used to summarize the context, or to switch to a different agent.
        state: key of the state in which the policy's next turn starts. The estimator gigpo compares a group's turns
            with equal keys. None: the observation is the key.
    """

    observation: str | Sequence[Message] | None = None
    reward: Reward = None
    done: bool = False
    as_is: bool = False
    restart: bool = False
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of a rollout, which `reset` may return instead of messages.

    Attributes:
        messages: conversation for the policy to continue.
        token_ids: token ids of the conversation, in place of messages. The conversation cannot be rendered again, so it
            must be possible to append every observation. It cannot have images.
        state: key of the state in which the policy's first turn starts, as in Step. None: the conversation is the key.
    """

    messages: Sequence[Message] = ()
    token_ids: Sequence[int] | None = None
    state: str | None = None


class Environment:
    """Base class for environments. A user class with these methods need not inherit from it. The constructor receives
    `environment.options` as keyword arguments. Methods decorated with `megarl.environments.tool` are tools that the
    policy may call. A class that only provides tools needs no other methods."""

    @property
    def toolbox(self) -> Toolbox:
        """This instance's tools."""
        if not hasattr(self, "_toolbox"):
            self._toolbox = Toolbox(self)
        return self._toolbox

    async def reset(self, task: Task) -> Sequence[Message] | Opening | None:
        """Start the rollout. Return the conversation for the policy to continue, or None for the task's messages."""
        return None

    async def step(self, turn: Turn) -> Step:
        """Respond to a turn. By default, run its tool calls. A turn without a tool call ends the rollout."""
        if turn.is_last or not turn.tool_calls:
            return Step(reward=await run(self.reward, turn), done=True)
        return Step(observation=await self.toolbox.call_all(turn.tool_calls))

    async def reward(self, turn: Turn) -> Reward:
        """Return the reward for a rollout that ends with this turn. None leaves scoring to the reward functions."""
        return None

    async def close(self) -> None:
        """Release the environment's resources. Called once at the end of every rollout."""


class Agent:
    """Base class for agents, programs that call the policy through an OpenAI-compatible endpoint. A user class with a
    `run` method need not inherit from it. The constructor receives `environment.options` as keyword arguments."""

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> Reward:
        """Work on the task. Each request to `base_url` with `api_key` is one turn of the rollout. The agent may pass
        the URL and the key to sub-agents and other programs. Return the reward for the rollout. None leaves scoring to
        the reward functions, which read the last sample."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release the agent's resources. Called once at the end of every rollout, including one that timed out."""
