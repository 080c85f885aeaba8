"""Rollouts of agents, which take their turns by the endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megarl.config.schema import Config
from megarl.core.types import Episode, RolloutInfo, Sample
from megarl.environments.hosts import HostFailure, HostProcess
from megarl.environments.protocol import StopReason, Task
from megarl.environments.sessions.recording import RecordedSample
from megarl.environments.sessions.server import MODEL, SessionServer
from megarl.environments.sessions.session import SessionLimits

if TYPE_CHECKING:
    from megarl.environments.runner import RolloutRequest, Sampler

SHORTEST_WAIT_S = 0.05


class AgentRollout:
    """One rollout under way, in a session of its own."""

    def __init__(self, config: Config, server: SessionServer, request: RolloutRequest, sample: Sampler):
        self._config, self._server, self._request = config, server, request
        self._session = server.open(sample, SessionLimits.of(config), request.seed, request.greedy)
        self._recorded: list[RecordedSample] = []
        self._rewards: dict[str, float] | None = None
        self.tool_calls: Counter[str] = Counter()
        self.failure: str | None = None
        self._stack = ""

    async def play(self, host: HostProcess) -> None:
        """Lets the agent do its work. Raises HostFailure for what it does wrong, and the engine's error if that failed.
        environment.timeout_s is the time that an agent has from one request to the next."""
        prompt, request = self._request.prompt, self._request
        task = Task(prompt.id, prompt.messages, prompt.answer, prompt.columns, request.task_seed)
        given = {"base_url": self._server.base_url, "api_key": self._session.token, "model": MODEL}
        work = asyncio.create_task(host.call("run", request.id, None, task=asdict(task), **given))
        try:
            await self._watch(work)
            self._rewards = work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._recorded = await self._server.close(self._session)
            if self._session.error is not None:
                raise self._session.error
        if not self._recorded:
            raise HostFailure("the agent sent no request to the endpoint")

    async def _watch(self, work: asyncio.Task[Any]) -> None:
        """Returns when the agent has done its work. Raises HostFailure if it sends no request for too long."""
        limit_s = self._config.environment.timeout_s
        while not work.done():
            left_s = limit_s - self._session.idle_s
            if left_s <= 0:
                raise HostFailure(f"the agent neither returned nor sent a request within {limit_s:g} s")
            await asyncio.wait([work], timeout=max(SHORTEST_WAIT_S, left_s))

    def fail(self, reason: str, stack: str = "") -> None:
        """Ends the rollout as failed."""
        self.failure, self._stack, self._rewards = reason, stack, None

    def samples(self) -> list[Sample]:
        """Returns a sample for each sequence; of a rollout without any, an empty one. The one with the latest turn is
        the last, which reward functions read."""
        prompt, name = self._request.prompt, self._request.id
        recorded = sorted(self._recorded, key=lambda sample: sample.last_turn)
        episode = self._episode(recorded)
        if not recorded:
            return [Sample(name, prompt, [], [], [], (), "stop", "", rollout_id=name, episode=episode)]
        return [
            sample.transcript.sample(
                name if number == 0 else f"{name}/{number}",
                prompt,
                sample.text,
                name,
                replace(
                    episode,
                    messages=sample.messages,
                    first_turn=sample.first_turn,
                    is_last=number + 1 == len(recorded),
                ),
            )
            for number, sample in enumerate(recorded)
        ]

    def _episode(self, recorded: Sequence[RecordedSample]) -> Episode:
        recording = self._session.recording
        # The agent's reward is of the whole rollout: it stands after those of the turns, which have none of their own.
        rewards: list[float | None] = [None] * (recorded[-1].last_turn + 1 if recorded else 0)
        if self._rewards is not None:
            rewards.append(sum(self._rewards.values()))
        info = RolloutInfo(
            stop_reason=self._session.stop_reason if self.failure is None else StopReason.FAILED,
            num_turns=sum(sample.transcript.num_turns for sample in recorded),
            num_samples=len(recorded),
            tool_calls=dict(self.tool_calls),
            num_context_tokens=recording.num_context_tokens,
            num_cached_tokens=recording.num_cached_tokens,
        )
        return Episode(
            info=info,
            rewards=tuple(rewards),
            parts={name: value for name, value in (self._rewards or {}).items() if name},
            failure=self.failure,
            messages=(),
            first_turn=0,
            is_last=True,
            stack=self._stack,
        )
