"""The protocol of environments: a task, then turns of the policy, each with an answer.

An environment is an object of its own for each rollout, in a process beside the engines. Its methods may be async or
not; one that is not runs in a thread, so that the other environments of its process go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FAILED, FinishReason
from megarl.environments.tools import MalformedCall, Message, Toolbox, ToolCall, run


class StopReason(StrEnum):
    """The reason why a rollout ended."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """No room is left for a further turn, or for what the environment answered."""
    FAILED = FAILED
    """The environment raised an error, hung, or ended its process: the rollout has no reward."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a rollout: a row of the data.

    id        the row's, the same for all rollouts of a group
    messages  the conversation that the row has as its prompt; empty for data.source=environment
    columns   all columns of the row
    seed      the same for all rollouts of a group, another in every step; in an evaluation, the same each time
    """

    id: str
    messages: Sequence[Message]
    answer: Any
    columns: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy.

    token_ids       int32 [R], as they were sampled
    text            what they decode to, special tokens left out
    finish_reason   "length" for a turn that was cut off at its limit of tokens
    tool_calls      the calls in it, in their order, read from the ids
    number          0 for the first turn of the rollout
    is_last         whether no turn follows, whatever the environment answers: environment.max_turns is reached, or no
                    room is left
    """

    token_ids: NDArray[np.int32]
    text: str
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall | MalformedCall, ...] = ()
    number: int = 0
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The answer of an environment to a turn.

    observation   what the conversation goes on with before the policy's next turn: text is a message of the user; None
                  where the rollout ends
    reward        of this turn: a number, or numbers by name, whose sum it is; None: the turn has none of its own
    done          whether the rollout ends
    as_is         whether the observation is text that follows right after the turn, not a message of its own
    restart       whether the observation is a whole conversation in place of the one so far, whose turns then are a
                  sample of their own: for a context that is summed up, or another agent
    """

    observation: str | Sequence[Message] | None = None
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    as_is: bool = False
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a rollout, which `reset` may return in place of messages.

    messages    the conversation that the policy answers
    token_ids   or its token ids, of which an environment then has to give observations that need no chat template
    """

    messages: Sequence[Message] = ()
    token_ids: Sequence[int] | None = None


class Environment:
    """The base of environments. A class of a user's file may have its methods without being derived from it.

    `environment.options` are the keyword arguments of its class. Methods marked with `megarl.environments.tool` are
    tools that the policy may call; a class that has only these needs no other method.
    """

    @property
    def toolbox(self) -> Toolbox:
        """The tools of this object."""
        if not hasattr(self, "_toolbox"):
            self._toolbox = Toolbox(self)
        return self._toolbox

    async def reset(self, task: Task) -> Sequence[Message] | Opening | None:
        """Begins the rollout. Returns the conversation that the policy answers; None: the task's messages."""
        return None

    async def step(self, turn: Turn) -> Step:
        """Answers a turn of the policy: calls the tools that it asks for. A turn without a call is the last one."""
        if turn.is_last or not turn.tool_calls:
            return Step(reward=await run(self.reward, turn), done=True)
        return Step(observation=await self.toolbox.call_all(turn.tool_calls))

    async def reward(self, turn: Turn) -> float | Mapping[str, float] | None:
        """Returns the reward of a rollout whose last turn this is; None: it has none but that of reward functions."""
        return None

    async def close(self) -> None:
        """Gives back what the environment holds. It is called once, at the end of every rollout."""
