"""Environment rollouts: alternate turns and observations, and convert them to training samples."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megarl.config.schema import Config
from megarl.core.completion import Completion
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.core.outage import Outage
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.core.score import ENVIRONMENT
from megarl.data.images import ImageError
from megarl.data.plain_turns import PlainTokens, text_ids
from megarl.data.turns import ChatTokens
from megarl.environments.agent_rollout import AgentRollout
from megarl.environments.hosts import FREE_MEMORY, TOOLS_S, HostFailure, HostPool, HostProcess
from megarl.environments.images import ImageReader, PlacedTokens, RolloutImages
from megarl.environments.message_end import message_end
from megarl.environments.observation import limit_observation
from megarl.environments.outcome import Outcome
from megarl.environments.protocol import StopReason, Task
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import turn_seed
from megarl.environments.states import state_of
from megarl.environments.text_length import ROOM, is_longer, num_tokens, texts_of
from megarl.environments.tools import Message
from megarl.environments.transcript import Context, Part, Transcript
from megarl.models.tokenizer import decode
from megarl.usercode.failures import RESTARTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

C = TypeVar("C", bound=Context | None)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request for one rollout. `id` is also the id of the rollout's first sample. With the same weights and
    observations, `seed` reproduces the rollout. All rollouts in the prompt's group share `task_seed`."""

    id: str
    prompt: Prompt
    seed: int
    task_seed: int

    @property
    def key(self) -> str:
        """The rollout's name in the environment's process. It differs from the rollout's id, because an aborted rollout
        with the same id may still be closing there."""
        return f"{self.id}/{id(self)}"


class Sampler(Protocol):
    """One rollout's interface to an engine, with the sampling parameters already bound."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        seed: int,
        stop: Sequence[str] = (),
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample a completion for this context; `images` are the images in it. Errors come from the engine and fail the
        run, not the rollout."""
        ...


def turn_tokens(config: Config, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]):
    """Return the renderer and parser for turns. Raise UserError if the chat template cannot append turns, or if there
    are tools but no chat template that supports them."""
    if config.data.chat_template:
        return ChatTokens(tokenizer, tools, config.environment.tool_format)
    if tools:
        raise UserError(
            f"environment.class={config.environment.name}: tools need a chat template. Fix: set data.chat_template=true"
        )
    return PlainTokens(tokenizer)


class RolloutRunner:
    """Runs any number of rollouts concurrently, in environments that live in a pool of processes."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, pool: HostPool, images: ImageReader | None = None
    ):
        """Create a runner. `images` is None if messages cannot contain images. Raise the errors of `turn_tokens`."""
        self.config, self.tokenizer, self.pool, self.images = config, tokenizer, pool, images
        self.tokens = turn_tokens(config, tokenizer, pool.tools)
        self._server: SessionServer | None = None
        self._outage = Outage(config.rewards.outage_s)
        teachers = config.teachers.models if config.teachers_see_feedback else []
        self._feedback_sources = {source for teacher in teachers for source in teacher.feedback or ()}
        self._num_failures = self._num_lost = 0
        """Numbers of failed and of lost rollouts since the last successful one."""

    async def start(self, address: str) -> None:
        """Start the endpoint for agents on this address. Do nothing if the class is an environment."""
        if self.pool.is_agent:
            rollout = self.config.rollout
            sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
            self._server = SessionServer(
                self.tokenizer,
                lambda tools: turn_tokens(self.config, self.tokenizer, tools),
                sampling,
            )
            await self._server.start(address)

    async def close(self) -> None:
        """Stop the endpoint and kill all environment processes. Without this call they exit when this process exits."""
        if self._server is not None:
            await self._server.stop()
        await self.pool.close()

    async def run(self, request: RolloutRequest, sample: Sampler) -> list[Sample]:
        """Run a rollout and return one or more samples. A failed rollout's samples carry the failure, not a reward.

        A rollout whose process is lost starts over in another process, up to RESTARTS times. In the last attempt, it
        has the process to itself, because another rollout in the process may have been the cause. While a service that
        the environment needs is unavailable, the rollout starts over with exponential backoff, for up to
        rewards.outage_s.

        Raise UserError after environment.max_consecutive_failures failed rollouts without a successful one, and
        InfrastructureFailure after the same number of lost ones, unless the limit is None.
        """
        pauses, num_restarts, num_lost = self._outage.begin_call(), 0, 0
        while True:
            rollout = (
                _Rollout(self, request, sample)
                if self._server is None
                else AgentRollout(self.config, self._server, request, sample, self.images)
            )
            rollout.outcome.num_restarts = num_restarts
            failure = await self._play(rollout, request.key, is_alone=num_lost == RESTARTS)
            if failure is None:
                self._outage.end()
                break
            pause, reason = None, str(failure)
            if failure.kind == "lost":
                num_lost += 1
                pause = 0.0 if num_lost <= RESTARTS else None
                reason = f"{reason} in each of {num_lost} attempts"
            elif failure.kind == "away":
                pause = next(pauses)
                reason = f"{reason} (for longer than rewards.outage_s={self._outage.limit_s:g})"
            if pause is None:
                stop_reason = StopReason.LOST if failure.is_infrastructure else StopReason.FAILED
                rollout.outcome.fail(reason, failure.stack, stop_reason)
                break
            print(f"environments: rollout {request.id} starts over: {failure}", flush=True)
            num_restarts += 1
            await asyncio.sleep(pause)
        self._count(rollout.outcome)
        if self._may_have_feedback(rollout.outcome):
            await _find_message_ends(rollout.parts)
        return rollout.samples(partial(decode, self.tokenizer, skip_special_tokens=False))

    async def _play(self, rollout: _Rollout | AgentRollout, key: str, is_alone: bool) -> HostFailure | None:
        """Run a rollout once, in a process of the pool, and close its environment. Return the failure, if any."""
        host, failure = await (self.pool.take_alone() if is_alone else self.pool.take()), None
        try:
            await rollout.play(host)
        except HostFailure as error:
            failure = error
        finally:  # close the environment even if the rollout was aborted or the engine was lost
            closing_failure = await asyncio.shield(self._close(host, key, rollout.outcome))
        if failure is None and closing_failure is not None and closing_failure.kind != "lost":
            return closing_failure
        return failure

    async def _close(self, host: HostProcess, key: str, outcome: Outcome) -> HostFailure | None:
        """Close the rollout's environment and release its process. Return the failure, if any."""
        try:
            outcome.tool_calls.update(await host.invoke("close", key, self.config.environment.timeout_s))
        except HostFailure as failure:
            return failure
        finally:
            await self.pool.give_back(host)
        return None

    def _may_have_feedback(self, outcome: Outcome) -> bool:
        """Return whether teachers may use feedback on the rollout. Reward functions give theirs later."""
        sources = self._feedback_sources
        has_own = ENVIRONMENT in sources and bool(outcome.feedback)
        return outcome.failure is None and (has_own or not sources <= {ENVIRONMENT})

    def _count(self, outcome: Outcome) -> None:
        """Count a finished rollout. Raise the errors of `run` if too many consecutive rollouts failed or were lost."""
        settings = self.config.environment
        limit = f"environment.max_consecutive_failures={settings.max_consecutive_failures}"
        if outcome.failure is None:
            self._num_failures = self._num_lost = 0
        elif outcome.stop_reason == StopReason.LOST:
            self._num_lost += 1
            if self._num_lost == settings.max_consecutive_failures:
                raise InfrastructureFailure(
                    f"{limit}: this many consecutive rollouts of environment.class={settings.name} were lost. Last "
                    f"failure: {outcome.failure}. {FREE_MEMORY}, or restore the service, then resume with resume=auto"
                )
        else:
            self._num_failures += 1
            if self._num_failures == settings.max_consecutive_failures:
                raise UserError(
                    f"{limit}: this many consecutive rollouts of environment.class={settings.name} failed. Fix: "
                    "remove the cause of the failures, or raise environment.max_consecutive_failures. Last failure: "
                    f"{outcome.failure}"
                )


class _Rollout:
    """One rollout in progress."""

    def __init__(self, runner: RolloutRunner, request: RolloutRequest, sample: Sampler):
        self._runner, self._request, self._sample = runner, request, sample
        self._config = runner.config
        self._images = RolloutImages(runner.images, request.prompt)
        self._tokens = PlacedTokens(runner.tokens, self._images)
        self.parts: list[Part] = []
        self._messages: list[Mapping[str, Any]] = []
        """Messages in the whole rollout."""
        self._conversation: list[Mapping[str, Any]] = []
        """Messages in the policy's current context."""
        self._state = 0
        """Hash of the state in which the next turn starts."""
        self.outcome = Outcome()

    async def play(self, host: HostProcess) -> None:
        """Run all turns. Raise HostFailure if the environment fails. If the rollout is aborted, a running call to the
        environment finishes first, because environments need not be thread-safe."""
        with suppress(_ContextFull):
            await self._play_turns(host)
            return
        self.outcome.stop_reason = StopReason.MAX_TOKENS

    async def _play_turns(self, host: HostProcess) -> None:
        """Run all turns. Raise _ContextFull if no further turn fits into the context."""
        await self._reset(host)
        while self._num_tokens_left > 0:
            turn = await self._sample_turn()
            step = await self._step(host, turn)
            self.outcome.turn_rewards.append(step["rewards"])
            self.outcome.add_feedback(step["feedback"])
            if step["done"]:
                return
            if turn["number"] + 1 == self._config.environment.max_turns:
                self.outcome.stop_reason = StopReason.MAX_TURNS
                return
            if turn["is_last"]:
                break
            with _fails_rollout():
                await self._append_observation(step)
        raise _ContextFull

    async def _reset(self, host: HostProcess) -> None:
        prompt, request = self._request.prompt, self._request
        row_messages = self._images.messages_of(prompt)
        task_messages = await self._images.with_urls(row_messages)
        task = Task(prompt.id, task_messages, prompt.answer, prompt.columns, request.task_seed)
        reset = host.invoke("reset", request.key, self._config.environment.timeout_s, task=asdict(task))
        opening = await _uninterrupted(reset)
        if opening["token_ids"] is not None:
            self._state = state_of(opening["state"] or opening["token_ids"])
            with _fails_rollout():
                self._images.require_no_placeholders(opening["token_ids"])
            self._start_sample([], Context(opening["token_ids"]))
            return
        messages = opening["messages"]
        if messages is not None:
            with _fails_rollout():
                messages = await self._images.read(messages)
        elif self._runner.pool.tools and row_messages:
            messages = row_messages  # the row's token ids lack the tool descriptions
        self._state = state_of(opening["state"] or messages or row_messages or prompt.token_ids.tolist())
        if messages is not None:
            with _fails_rollout():
                context = await self._tokenize(self._tokens.begin, messages)
                shown = await asyncio.to_thread(self._tokens.shown, messages)
            self._start_sample(messages, context, shown)
        elif len(prompt.token_ids):
            self._start_sample(row_messages, Context(prompt.token_ids.tolist(), prompt.images))
        else:
            raise HostFailure(
                "reset returned no messages, but data.source=environment provides none. Fix: return messages from reset"
            )

    def _start_sample(
        self,
        conversation: Sequence[Message],
        context: Context,
        shown: Sequence[Message] | None = None,
    ) -> None:
        """Start a sample with this context. `shown` are the messages to record, by default the conversation."""
        begin = self._tokens.begin
        find_end = partial(message_end, lambda messages: begin(messages).ids, tuple(conversation), context.ids)
        transcript = Transcript(context.ids, context.images)
        self.parts.append(Part(transcript, "", self._messages, find_message_end=find_end))
        self._conversation = list(conversation)
        self._messages += conversation if shown is None else shown

    @property
    def _num_tokens_left(self) -> int:
        """Token limit for the next turn."""
        rollout, transcript = self._config.rollout, self.parts[-1].transcript
        left = min(
            rollout.max_new_tokens - transcript.num_response_tokens, rollout.context_length - len(transcript.ids)
        )
        return min(left, self._config.environment.turn_tokens or left)

    async def _sample_turn(self) -> dict[str, Any]:
        """Sample a turn and return the fields of the Turn that the environment receives."""
        part, number = self.parts[-1], len(self.outcome.turn_rewards)
        transcript = part.transcript
        seed = turn_seed(self._request.seed, number)
        completion = await self._sample(transcript.ids, self._num_tokens_left, seed, images=tuple(transcript.images))
        context = transcript.ids[:]
        transcript.add_turn(completion)
        part.turns.append((number, self._state))
        sampled_ids = completion.text_ids.tolist()
        with _fails_rollout():
            text, calls = await asyncio.to_thread(self._runner.tokens.read, sampled_ids, context)
        part.text = text
        self._add_messages([{"role": "assistant", "content": self._runner.tokenizer.decode(sampled_ids)}])
        return {
            "token_ids": completion.token_ids.tolist(),
            "text": text,
            "finish_reason": completion.finish_reason,
            "tool_calls": [asdict(call) for call in calls],
            "number": number,
            "is_last": number + 1 == self._config.environment.max_turns or self._num_tokens_left <= 0,
        }

    async def _step(self, host: HostProcess, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Send the turn to the environment, and return its Step in serialized form."""
        settings = self._config.environment
        limit_s = settings.timeout_s + len(turn["tool_calls"]) * (settings.tool_timeout_s + TOOLS_S)
        step = await _uninterrupted(host.invoke("step", self._request.key, limit_s, turn=turn))
        host.is_retiring |= step["is_stuck"]
        return step

    async def _append_observation(self, step: Mapping[str, Any]) -> None:
        """Append the observation. Start a new sample if it replaces the conversation or cannot be appended. Raise
        _ContextFull if the observation is too long. This is not a failure, because the policy's turn may have caused
        it."""
        messages = await self._images.read(step["messages"])
        self._state = state_of(step["state"] or messages)
        if step["restart"]:
            context = await self._tokenize(self._tokens.begin, messages)
            self._start_sample(messages, context, await asyncio.to_thread(self._tokens.shown, messages))
            return
        limit = partial(limit_observation, tokenizer=self._runner.tokenizer, settings=self._config.environment)
        messages = await asyncio.to_thread(limit, messages)
        if messages is None:
            raise _ContextFull
        extend = self._raw_context
        if not step["as_is"]:
            extend = partial(self._tokens.extend, self.parts[-1].transcript.last_turn.token_ids.tolist())
        context = await self._tokenize(extend, messages)
        if context is None:
            conversation = [*self._conversation, *messages]
            self._start_sample(conversation, await self._tokenize(self._tokens.begin, conversation), messages)
            return
        if not context.ids:
            raise HostFailure("the observation renders as empty text. Fix: return text, or done=True")
        self.parts[-1].transcript.add_context(context)
        self._add_messages(messages)

    async def _tokenize(self, tokenize: Callable[[Sequence[Message]], C], messages: Sequence[Message]) -> C:
        """Tokenize messages in a thread, because the event loop serves all rollouts. Raise _ContextFull if they are
        much longer than the context."""
        texts = [text for message in messages for text in texts_of(message)]
        most = ROOM * self._config.rollout.context_length - self._images.num_tokens(messages)
        if await is_longer(texts, most, partial(num_tokens, self._runner.tokenizer)):
            raise _ContextFull
        return await asyncio.to_thread(tokenize, messages)

    def _raw_context(self, messages: Sequence[Message]) -> Context:
        """Return the ids of the messages' text without the chat template."""
        return Context(text_ids(self._runner.tokenizer, "".join(message["content"] for message in messages)))

    def _add_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._conversation += messages
        self._messages += messages

    def samples(self, decode: Callable[[Sequence[int]], str]) -> list[Sample]:
        """Return one sample per sequence that has a turn."""
        return self.outcome.samples(self._request.id, self._request.prompt, self.parts, decode)


async def _find_message_ends(parts: Sequence[Part]) -> None:
    """Find the parts' `message_end` in a thread, because the event loop serves all rollouts."""
    for part in parts:
        if part.find_message_end is not None:
            part.message_end = await asyncio.to_thread(part.find_message_end)


class _ContextFull(Exception):
    """Raised if no further turn fits into a rollout's context, or an observation is longer than permitted."""


@contextmanager
def _fails_rollout() -> Iterator[None]:
    """Convert any exception in the body, such as a tokenizer error, to a HostFailure, which fails only this rollout."""
    try:
        yield
    except (HostFailure, _ContextFull):
        raise
    except UserError as error:  # the chat template rejected the messages
        raise HostFailure(str(error)) from None
    except ImageError as error:
        raise HostFailure(f"an image from the environment: {error}. Fix: {error.fix}") from None
    except Exception as error:
        stack = "".join(traceback.format_exception(error))
        raise HostFailure(f"a turn cannot be processed ({type(error).__name__}: {error})", stack) from error


async def _uninterrupted(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the call's result. If this task is canceled, let the call finish before the cancellation takes effect."""
    task = asyncio.create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
