"""The `megarl` command with FakeEngine in place of vLLM: `python -m tests.fakes.megarl train ...`.

Jobs launched with `--command` set to it use FakeEngine as well.
"""

from __future__ import annotations

import sys

from megarl.cli import main
from megarl.launch import task


def use_fake_engines() -> None:
    from megarl.cluster.groups.engines import EngineGroup
    from tests.fakes.engine import EngineActor

    EngineGroup.actor_class = EngineActor


if __name__ == "__main__":
    task.MEGARL = (sys.executable, "-m", "tests.fakes.megarl")
    if sys.argv[1] == "train":
        use_fake_engines()
    main()
