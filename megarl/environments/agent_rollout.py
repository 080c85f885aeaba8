"""Rollouts of agents: programs that reach the policy by HTTP, each under a session of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from megarl.core.types import Episode, RolloutInfo, Sample
from megarl.environments.hosts import HostFailure, HostProcess
from megarl.environments.protocol import StopReason, Task
from megarl.environments.sessions.recording import RecordedSample
from megarl.environments.sessions.server import MODEL, SessionServer
from megarl.environments.sessions.session import SessionLimits

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.environments.runner import RolloutRequest, Sampler


class AgentRollout:
    """One rollout of an agent, which is over when its method `run` returns."""

    def __init__(self, config: Config, server: SessionServer, request: RolloutRequest, sample: Sampler):
        self._config, self._server, self._request, self._sample = config, server, request, sample
        self._recorded: list[RecordedSample] = []
        self._rewards: Mapping[str, float] = {}
        self._stop_reason = StopReason.DONE
        self._stack = ""
        self.tool_calls: Counter[str] = Counter()
        self.failure: str | None = None

    async def play(self, host: HostProcess) -> None:
        """Lets the agent work. Raises HostFailure for what it does wrong, and what the engine has raised."""
        request, prompt = self._request, self._request.prompt
        task = Task(prompt.id, prompt.messages, prompt.answer, prompt.columns, request.task_seed)
        session = self._server.open(self._sample, SessionLimits.of(self._config), request.seed, request.greedy)
        access = {"base_url": self._server.base_url, "api_key": session.token, "model": MODEL}
        try:
            limit_s = self._config.environment.agent_timeout_s
            self._rewards = await host.call("run", request.id, limit_s, task=asdict(task), **access) or {}
            self._stop_reason = session.stop_reason
        except HostFailure:
            if session.error is None:  # else the agent has failed because of the engine
                raise
        finally:
            self._recorded = await self._server.close(session)
        if session.error is not None:
            raise session.error

    def fail(self, reason: str, stack: str = "") -> None:
        """Ends the rollout as failed."""
        self.failure, self._stack, self._stop_reason = " ".join(reason.split()), stack, StopReason.FAILED

    def samples(self) -> list[Sample]:
        """Returns a sample for each sequence that the session has recorded; of one without turns, an empty one."""
        prompt, name = self._request.prompt, self._request.id
        info = RolloutInfo(
            stop_reason=self._stop_reason,
            num_turns=sum(recorded.transcript.num_turns for recorded in self._recorded),
            num_samples=len(self._recorded),
            tool_calls={},
            num_context_tokens=sum(recorded.transcript.num_context_tokens for recorded in self._recorded),
            num_cached_tokens=sum(recorded.transcript.num_cached_tokens for recorded in self._recorded),
        )

        def episode(recorded: RecordedSample | None, is_last: bool) -> Episode:
            return Episode(
                info=info,
                rewards=(),
                parts={part: value for part, value in self._rewards.items() if part},
                failure=self.failure,
                messages=() if recorded is None else recorded.messages,
                first_turn=0 if recorded is None else recorded.first_turn,
                is_last=is_last,
                stack=self._stack,
                outcome=sum(self._rewards.values()),
            )

        if not self._recorded:
            return [Sample(name, prompt, [], [], [], (), "stop", "", rollout_id=name, episode=episode(None, True))]
        last = max(self._recorded, key=lambda recorded: recorded.last_turn)
        return [
            recorded.transcript.sample(
                name if number == 0 else f"{name}/{number}",
                prompt,
                recorded.text,
                name,
                episode(recorded, recorded is last),
            )
            for number, recorded in enumerate(self._recorded)
        ]
