"""The schema of section `cluster`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from megarl.config.fields import Section, Text
from megarl.core.ranges import PositiveFloat, PositiveInt

TimeoutKind = Literal["start", "rollout", "rewards", "passes", "update", "refit", "checkpoint"]
"""Keys of `Timeouts`. Each time the driver waits for another process, one of these timeouts applies."""


class Timeouts(Section):
    start: PositiveFloat
    rollout: PositiveFloat
    rewards: PositiveFloat
    passes: PositiveFloat
    update: PositiveFloat
    refit: PositiveFloat
    checkpoint: PositiveFloat

    def seconds(self, limit: TimeoutKind) -> float:
        return getattr(self, limit)

    @property
    def longest(self) -> float:
        """The longest timeout. It applies to waits that belong to several phases."""
        return max(map(self.seconds, get_args(TimeoutKind)))


Devices = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^(nodes? )?\d+(-\d+)?$"),
]
"""A range of device numbers, counted across all nodes, such as 0-15, a single device, or a range of nodes, such as
nodes 0-3."""


class Roles(Section):
    actor: Devices | None
    critic: Devices | None
    implicit_reward: Devices | None
    reward_model: Devices | None
    teachers: Devices | None
    rollout: Devices | None

    @property
    def assigned(self) -> dict[str, range]:
        """Device or node numbers of each role that has a range in the config."""
        numbers = {role: text.split(" ")[-1].split("-") for role, text in self if text is not None}
        return {role: range(int(ends[0]), int(ends[-1]) + 1) for role, ends in numbers.items()}

    @property
    def on_nodes(self) -> set[str]:
        """Roles whose range is given in nodes."""
        return {role for role, text in self if text is not None and text.startswith("node")}


class Cluster(Section):
    nodes: PositiveInt
    interface: Text | None
    placement: Literal["colocated", "disaggregated"]
    roles: Roles
    timeouts: Timeouts
    object_store_mib: PositiveInt | None
    replace_ranks: bool
    copy_every_steps: PositiveInt
    spare_processes: bool | None
