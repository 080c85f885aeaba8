"""The `megarl` command with FakeEngine in place of vLLM: `python -m tests.fakes.megarl train ...`. With `--trainers`
before the command, FakeTrainer also takes the place of Megatron.

Jobs launched with `--command` set to it use the fakes as well.
"""

from __future__ import annotations

import sys

from megarl.cli import main
from megarl.launch import task

TRAINERS = "--trainers"


def use_fake_engines() -> None:
    from megarl.cluster.groups.engines import EngineGroup
    from tests.fakes.engine import EngineActor

    EngineGroup.actor_class = EngineActor


def use_fake_trainers() -> None:
    from megarl.cluster.groups.trainers import TrainerGroup
    from tests.fakes.trainer import TrainerActor

    TrainerGroup.actor_class = TrainerActor


if __name__ == "__main__":
    options = [TRAINERS] if sys.argv[1] == TRAINERS else []
    del sys.argv[1 : 1 + len(options)]
    task.MEGARL = (sys.executable, "-m", "tests.fakes.megarl", *options)
    if sys.argv[1] == "train":
        use_fake_engines()
        if options:
            use_fake_trainers()
    main()
