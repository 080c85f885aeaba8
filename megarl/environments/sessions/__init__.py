"""An OpenAI Chat Completions endpoint in front of the engines that records the turns that agents sample."""

from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import Session, SessionLimits

__all__ = ["Session", "SessionLimits", "SessionServer"]
