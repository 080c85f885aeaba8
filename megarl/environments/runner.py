"""Rollouts in environments: turns of the policy and what the environment answers, as samples to train on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.types import Completion, Prompt, Sample
from megarl.data.plain_turns import PlainTokens, text_ids
from megarl.data.turns import ChatTokens
from megarl.environments.agent_rollout import AgentRollout
from megarl.environments.hosts import TOOLS_S, HostFailure, HostPool, HostProcess
from megarl.environments.outcome import Outcome, Part
from megarl.environments.protocol import StopReason, Task
from megarl.environments.sessions.server import SessionServer
from megarl.environments.transcript import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout to make.

    id          the rollout's, and that of its first sample
    seed        of what is sampled: the same weights and answers of the environment give the same rollout
    task_seed   the same for all rollouts of the prompt's group
    """

    id: str
    prompt: Prompt
    seed: int
    task_seed: int


class Sampler(Protocol):
    """An engine, as one rollout uses it: whether it is greedy, its temperature and the like are the rollout's."""

    async def __call__(
        self, token_ids: Sequence[int], max_new_tokens: int, seed: int, stop: Sequence[str] = ()
    ) -> Completion:
        """Return what the policy says after these tokens."""


def turn_tokens(config: Config, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]):
    """Return what writes and reads turns. Raises UserError for a chat template that cannot be gone on with, and for
    tools that it, or a run without one, has no place for."""
    if config.data.chat_template:
        return ChatTokens(tokenizer, tools, config.environment.tool_format)
    if tools:
        raise UserError(
            f"environment.class={config.environment.name}: its tools need data.chat_template=true, which says how they "
            "are called"
        )
    return PlainTokens(tokenizer)


class RolloutRunner:
    """Makes rollouts, any number of them at once, in environments that live in a pool of processes."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, pool: HostPool):
        """Raise UserError as turn_tokens does."""
        self.config, self.tokenizer, self.pool = config, tokenizer, pool
        self.tokens = turn_tokens(config, tokenizer, pool.tools)
        self._server: SessionServer | None = None
        self._num_failed_in_a_row = 0

    async def start(self, address: str) -> None:
        """Start what agents need to reach the policy: an endpoint on this address, if the environment is one."""
        if self.pool.is_agent:
            rollout = self.config.rollout
            sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
            self._server = SessionServer(
                self.tokenizer, lambda tools: turn_tokens(self.config, self.tokenizer, tools), sampling
            )
            await self._server.start(address)

    async def close(self) -> None:
        """End the endpoint and all environments. Else they end with this process."""
        if self._server is not None:
            await self._server.stop()
        await self.pool.close()

    async def run(self, request: RolloutRequest, sample: Sampler) -> list[Sample]:
        """Return the samples of a rollout, at least one. One that fails has no reward, but the reason. Raises
        UserError if environment.max_consecutive_failures rollouts have failed, unless that is None."""
        rollout = (
            _Rollout(self, request, sample)
            if self._server is None
            else AgentRollout(self.config, self._server, request, sample)
        )
        host = await self.pool.take()
        try:
            await rollout.play(host)
        except HostFailure as failure:
            rollout.outcome.fail(str(failure), failure.stack)
        except UserError as error:  # messages that the chat template refuses
            rollout.outcome.fail(str(error))
        finally:  # also of a rollout whose engine was lost
            await self._close(host, request.id, rollout.outcome)
        self._count(rollout.outcome)
        return rollout.samples()

    async def _close(self, host: HostProcess, rollout: str, outcome: Outcome) -> None:
        """End a rollout's environment, and gives its process back."""
        try:
            outcome.tool_calls.update(await host.call("close", rollout, self.config.environment.timeout_s))
        except HostFailure as failure:
            outcome.fail(str(failure), failure.stack)
        finally:
            await self.pool.give_back(host)

    def _count(self, outcome: Outcome) -> None:
        settings = self.config.environment
        self._num_failed_in_a_row = self._num_failed_in_a_row + 1 if outcome.failure is not None else 0
        if self._num_failed_in_a_row == settings.max_consecutive_failures:
            raise UserError(
                f"environment.class={settings.name}: {self._num_failed_in_a_row} rollouts in a row failed "
                f"(environment.max_consecutive_failures), the last one: {outcome.failure}"
            )


class _Rollout:
    """One rollout under way."""

    def __init__(self, runner: RolloutRunner, request: RolloutRequest, sample: Sampler):
        self._runner, self._request, self._sample = runner, request, sample
        self._config, self._tokens = runner.config, runner.tokens
        self._transcripts: list[Transcript] = []
        self._texts: list[str] = []
        """The text of the last turn in each transcript."""
        self._first_turns: list[int] = []
        self._messages: list[Mapping[str, Any]] = []
        """What has been said in the whole rollout."""
        self._conversation: list[Mapping[str, Any]] = []
        """What of it the policy has before it."""
        self.outcome = Outcome()

    async def play(self, host: HostProcess) -> None:
        """Make all turns. Raises HostFailure for what the environment does wrong."""
        await self._reset(host)
        while self._room > 0:
            turn = await self._take_turn()
            step = await self._answer(host, turn)
            self.outcome.turn_rewards.append(step["rewards"])
            if step["done"]:
                return
            if turn["number"] + 1 == self._config.environment.max_turns:
                self.outcome.stop_reason = StopReason.MAX_TURNS
                return
            if turn["is_last"]:
                break
            self._go_on(step)
        self.outcome.stop_reason = StopReason.MAX_TOKENS

    async def _reset(self, host: HostProcess) -> None:
        prompt, request = self._request.prompt, self._request
        task = Task(prompt.id, prompt.messages, prompt.answer, prompt.columns, request.task_seed)
        opened = await host.call("reset", request.id, self._config.environment.timeout_s, task=asdict(task))
        if opened["token_ids"] is not None:
            self._begin([], opened["token_ids"])
        elif opened["messages"] is not None:
            self._begin(opened["messages"], self._tokens.begin(opened["messages"]))
        elif len(prompt.token_ids):
            self._begin(prompt.messages, prompt.token_ids.tolist())
        else:
            raise HostFailure("reset returned no messages, and data.source=environment has none")

    def _begin(self, messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int]) -> None:
        """Begin a sample."""
        self._transcripts.append(Transcript(token_ids))
        self._texts.append("")
        self._first_turns.append(len(self.outcome.turn_rewards))
        self._conversation = list(messages)
        self._messages += messages

    @property
    def _room(self) -> int:
        """The tokens that the next turn may have."""
        rollout, transcript = self._config.rollout, self._transcripts[-1]
        left = min(
            rollout.max_new_tokens - transcript.num_response_tokens, rollout.context_length - len(transcript.ids)
        )
        return min(left, self._config.environment.turn_tokens or left)

    async def _take_turn(self) -> dict[str, Any]:
        """Samples a turn. Return it as the environment gets it."""
        transcript, number = self._transcripts[-1], len(self.outcome.turn_rewards)
        seed = self._request.seed if number == 0 else _turn_seed(self._request.seed, number)
        completion = await self._sample(transcript.ids, self._room, seed)
        context = transcript.ids[:]
        transcript.add_turn(completion)
        shown = completion.text_ids.tolist()
        text, calls = self._tokens.read(shown, context)
        self._texts[-1] = text
        self._say([{"role": "assistant", "content": self._runner.tokenizer.decode(shown)}])
        return {
            "token_ids": completion.token_ids.tolist(),
            "text": text,
            "finish_reason": completion.finish_reason,
            "tool_calls": [asdict(call) for call in calls],
            "number": number,
            "is_last": number + 1 == self._config.environment.max_turns or self._room <= 0,
        }

    async def _answer(self, host: HostProcess, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return the environment's Step, as its host writes it."""
        settings = self._config.environment
        limit_s = settings.timeout_s + len(turn["tool_calls"]) * (settings.tool_timeout_s + TOOLS_S)
        step = await host.call("step", self._request.id, limit_s, turn=turn)
        host.is_retiring |= step["is_stuck"]
        return step

    def _go_on(self, step: Mapping[str, Any]) -> None:
        """Append what the environment has answered, or begins a new sample where that cannot follow what is there."""
        messages = step["messages"]
        if step["restart"]:
            self._begin(messages, self._tokens.begin(messages))
            return
        turn_ids = self._transcripts[-1].last_turn.token_ids.tolist()
        if step["as_is"]:
            follows = text_ids(self._runner.tokenizer, "".join(message["content"] for message in messages))
        else:
            follows = self._tokens.extend(turn_ids, messages)
        if follows == []:
            raise HostFailure("its observation has no tokens; give text, or done=True")
        if follows is None:
            conversation = [*self._conversation, *messages]
            self._messages += messages
            self._begin([], self._tokens.begin(conversation))
            self._conversation = conversation
            return
        self._transcripts[-1].add_context(follows)
        self._say(messages)

    def _say(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._conversation += messages
        self._messages += messages

    def samples(self) -> list[Sample]:
        """Return a sample for each sequence with a turn. Reward functions read the last one."""
        begun = zip(self._transcripts, self._texts, self._first_turns, strict=True)
        parts = [Part(transcript, text, self._messages, first_turn) for transcript, text, first_turn in begun]
        return self.outcome.samples(self._request.id, self._request.prompt, parts)


def _turn_seed(*place: int) -> int:
    return random.Random(repr(place)).getrandbits(31)
