"""An EnvironmentActor outside Ray, with environments in real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from megarl.cluster.groups import environments, group
from megarl.cluster.groups.environments import EnvironmentActor
from megarl.config.schema import Config
from megarl.rollout.turns import EngineTurns, Exchanged
from tests.unit.environments.test_runner import TOKENIZER


@asynccontextmanager
async def environment_actor(config: Config) -> AsyncIterator[Any]:
    """Run an actor with one environment process. It returns samples in place of references."""
    actor_class = EnvironmentActor.__ray_metadata__.modified_class
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.ProcessActor, "__init__", lambda self, process, logs: setattr(self, "_process", process))
        patch.setattr(environments, "bypass_proxies", lambda _: None)
        patch.setattr(environments, "put_samples", lambda samples: samples)
        patch.setattr(environments, "load_tokenizer", lambda folder, **_: TOKENIZER)
        actor = actor_class(SimpleNamespace(name="environments-0", threads=1), Path())
        await actor.start(config, Path())
        try:
            yield actor
        finally:
            if config.has_environment:
                await actor._training.close()


def handle_of(engine: Any) -> Any:
    """Return a handle to an engine in this process. The engine is lost if its attribute `is_lost` is true or an error
    of Ray."""
    turns = EngineTurns(engine)

    async def exchange(maker: str, *arguments: Any) -> Exchanged:
        if engine.is_lost:
            raise RayActorError if engine.is_lost is True else engine.is_lost
        return await turns.exchange(*arguments)

    return type("Handle", (), {"exchange": SimpleNamespace(remote=exchange)})()
