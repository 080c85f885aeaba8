"""Agent rollouts. Each agent calls the policy over HTTP in its own session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megarl.core.sample import Sample
from megarl.environments.hosts import HostFailure, HostProcess
from megarl.environments.images import ImageReader, RolloutImages
from megarl.environments.outcome import Outcome
from megarl.environments.protocol import Task
from megarl.environments.sessions.server import MODEL, SessionServer
from megarl.environments.sessions.session import SessionLimits
from megarl.environments.transcript import Part

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.environments.runner import RolloutRequest, Sampler


class AgentRollout:
    """One rollout of an agent. It ends when the agent's `run` method returns."""

    def __init__(
        self,
        config: Config,
        server: SessionServer,
        request: RolloutRequest,
        sample: Sampler,
        images: ImageReader | None = None,
    ):
        self._config, self._server, self._request, self._sample = config, server, request, sample
        self._images = RolloutImages(images, request.prompt)
        self.parts: list[Part] = []
        self.outcome = Outcome()

    async def play(self, host: HostProcess) -> None:
        """Run the agent. Raise HostFailure if the agent fails, and re-raise engine errors."""
        request, prompt = self._request, self._request.prompt
        messages = await self._images.with_urls(self._images.messages_of(prompt))
        task = Task(prompt.id, messages, prompt.answer, prompt.columns, request.task_seed)
        session = self._server.open(self._sample, SessionLimits.of(self._config), request.seed, self._images)
        access = {"base_url": self._server.base_url, "api_key": session.token, "model": MODEL}
        try:
            limit_s = self._config.environment.agent_timeout_s
            result = await host.invoke("run", request.key, limit_s, task=asdict(task), **access)
            self.outcome.rewards = result["rewards"] or {}
            self.outcome.add_feedback(result["feedback"])
            self.outcome.stop_reason = session.stop_reason
        except HostFailure:
            if session.error is None:  # otherwise, the cause is an engine error, raised below
                raise
        finally:
            self.parts = await self._server.close(session)
        if session.error is not None:
            raise session.error
        if not self.parts:
            raise HostFailure(
                "the agent sent no request to the endpoint. Fix: call the OpenAI API at base_url with api_key and model"
            )

    def samples(self, decode: Callable[[Sequence[int]], str]) -> list[Sample]:
        """Return one sample per recorded sequence."""
        return self.outcome.samples(self._request.id, self._request.prompt, self.parts, decode)
