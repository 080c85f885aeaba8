"""The command `megarl` whose runs have FakeEngine in place of vLLM: `python -m tests.fakes.megarl train ...`."""

from __future__ import annotations

from megarl.cli import main
from megarl.cluster.groups.engines import EngineGroup
from tests.fakes.engine import EngineActor

if __name__ == "__main__":
    EngineGroup.actor_class = EngineActor
    main()
