"""The session door: an endpoint in front of the engines that speaks OpenAI Chat Completions and records what is sampled."""

from megarl.environments.sessions.recording import RecordedSample
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import Session, SessionLimits

__all__ = ["RecordedSample", "Session", "SessionLimits", "SessionServer"]
