"""The endpoint in front of the engines, by which any agent is trained: OpenAI Chat Completions, recorded as sampled."""

from megarl.environments.sessions.recording import RecordedSample
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import Session, SessionLimits

__all__ = ["RecordedSample", "Session", "SessionLimits", "SessionServer"]
