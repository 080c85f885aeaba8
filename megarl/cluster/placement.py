"""The placement of a run's processes on nodes and GPUs: plain data that is printed before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.config.device_spans import ENGINE, NAMES, device_spans, devices_per_node, num_devices
from megarl.config.model_schema import Placed, RewardModel, Teacher, Teachers, entry_prefix, layout_key
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.cores import usable_cores
from megarl.core.text import counted
from megarl.resharding.piece import Holder

MAX_USER_PROCESSES = 16
"""Default limit on the processes for reward functions, and on the environment processes per engine."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine in the run. Devices are numbered across nodes. Without GPUs, each role has one rank per device."""

    number: int
    devices: range
    cores: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process in the run. An engine that spans several nodes consists of parts: one process on each node.

    Attributes:
        threads: number of CPU threads for the process's operators. For rewards and environments, the number of
            processes that run the user's code.
        devices: devices for the process's ranks, in rank order.
        reads: additional GPUs on the same node whose weights the process may read.
        on_gpus: whether `devices` are GPUs.
        part_number: index of this part within its engine.
        rest: in an engine's first part, the engine's remaining parts.
    """

    role: str
    index: int
    threads: int
    node: Node = Node(0, range(1), 1)
    devices: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    on_gpus: bool = False
    part_number: int = 0
    rest: tuple[Process, ...] = ()

    def describe(self) -> str:
        return f"{self.role} × {self.threads} {'thread' if self.threads == 1 else 'threads'}"

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}" + (f".{self.part_number}" if self.part_number else "")

    @property
    def parts(self) -> tuple[Process, ...]:
        return (self, *self.rest)

    @property
    def gpus(self) -> tuple[int, ...]:
        return self.devices if self.on_gpus else ()

    def environment(self, inherited: str | None) -> dict[str, str]:
        """Return the environment variables that make GPUs visible to the process: its own GPUs first, then the GPUs
        that it reads. `inherited` is the node's value of CUDA_VISIBLE_DEVICES."""
        if not self.gpus:
            return {}
        numbers = [gpu - self.node.devices.start for gpu in (*self.gpus, *self.reads)]
        names = inherited.split(",") if inherited else [str(gpu) for gpu in range(max(numbers) + 1)]
        return {VISIBLE: ",".join(names[gpu] for gpu in numbers)}

    def hold(self, holders: Sequence[Holder]) -> list[Holder]:
        """Return a holder for each rank of every part, with the rank's node and GPU."""
        places = [(part.node.number, gpu if part.on_gpus else None) for part in self.parts for gpu in part.devices]
        pairs = zip(holders, places, strict=True)
        return [replace(holder, node=node, device=device) for holder, (node, device) in pairs]


@dataclass(frozen=True, slots=True)
class Placement:
    """The processes in a run. `teachers` lists the processes of each teacher. Without engines, there is no process for
    rewards. On CPU, models and engines take turns, so each of them may use all cores on its node."""

    nodes: tuple[Node, ...]
    trainers: tuple[Process, ...]
    critics: tuple[Process, ...]
    reward_models: tuple[Process, ...]
    implicit_rewards: tuple[Process, ...]
    engines: tuple[Process, ...]
    rewards: tuple[Process, ...]
    environments: tuple[Process, ...] = ()
    teachers: tuple[tuple[Process, ...], ...] = ()

    @property
    def groups(self) -> Iterator[tuple[Process, ...]]:
        ranks = (self.trainers, self.critics, self.reward_models, self.implicit_rewards, *self.teachers, self.engines)
        return (group for group in (*ranks, self.environments, self.rewards) if group)

    def describe(self) -> str:
        """Return a line with the roles and, with several nodes, a line with the processes of each node."""
        line = ", ".join(f"{len(g)} {g[0].describe()}{_where(_parts(g))}" for g in self.groups)
        if len(self.nodes) == 1:
            return line
        return "\n".join([line, *(f"node {node.number}: {self._on(node)}" for node in self.nodes)])

    def _on(self, node: Node) -> str:
        groups = [[part for part in _parts(group) if part.node == node] for group in self.groups]
        return ", ".join(f"{_names(group)}{_where(group)}" for group in groups if group)


def place(
    config: Config, cores: int | None = None, on_gpus: bool = False, gpus_per_node: int | None = None
) -> Placement:
    """Place all processes in a run on its nodes, assuming that the nodes are identical. Raise UserError if the layouts
    do not fill the nodes, or a tensor-parallel group crosses a node boundary.

    Args:
        cores: number of cores on each node; None: the cores available to this process.
        gpus_per_node: number of GPUs on each node; None: a single node with as many GPUs as needed.
    """
    nodes = _nodes(config, cores or usable_cores(), gpus_per_node if on_gpus else None)
    check_nodes(config, nodes)
    spans = device_spans(config)

    def ranks(settings: Placed) -> tuple[Process, ...]:
        """Return one process per rank. For a reward model or a teacher in vLLM, return one process per engine; it
        starts the engine's ranks."""
        span = spans[NAMES[settings.section]][: settings.layout.world_size]
        if isinstance(settings, RewardModel | Teachers) and settings.engine == "vllm":
            return processes(NAMES[settings.section], span, settings.layout.tp, settings.threads)
        # Host operations of a GPU rank are so short that synchronizing several threads would slow them down.
        updates_on_host = settings.megatron_overrides.optimizer.get("optimizer_cpu_offload", False)
        threads = settings.threads or (1 if on_gpus and not updates_on_host else None)
        return processes(NAMES[settings.section], span, 1, threads)

    def teacher_ranks(teacher: Teacher) -> tuple[Process, ...]:
        role = f"{NAMES['teachers']}-{teacher.name}"
        return tuple(replace(process, role=role) for process in ranks(config.teachers.only(teacher)))

    def processes(
        role: str, span: range, size: int, threads: int | None, weights: Sequence[int] = ()
    ) -> tuple[Process, ...]:
        """Return processes with `size` ranks each on these devices. weights: GPUs with model weights that the processes
        may read."""
        result = []
        for index in range(len(span) // size):
            ranks = span[index * size : (index + 1) * size]
            parts: list[Process] = []
            for node in nodes:
                if not (devices := tuple(gpu for gpu in ranks if gpu in node.devices)):
                    continue
                reads = tuple(gpu for gpu in weights if gpu in node.devices and gpu not in devices)
                share = threads or max(1, node.cores // len(set(span).intersection(node.devices)))
                parts.append(Process(role, index, share, node, devices, reads, on_gpus, len(parts)))
            result.append(replace(parts[0], rest=tuple(parts[1:])))
        return tuple(result)

    rollout, actors = config.rollout, spans[NAMES["actor"]]
    engines = () if config.is_offline else processes(ENGINE, spans[ENGINE], rollout.tp, rollout.threads, actors)
    return Placement(
        nodes=nodes,
        trainers=ranks(config.actor),
        critics=ranks(config.critic) if config.has_critic else (),
        reward_models=ranks(config.reward_model) if config.has_reward_model else (),
        implicit_rewards=ranks(config.implicit_reward) if config.has_implicit_reward else (),
        engines=engines,
        rewards=() if config.is_offline else (_rewards(config, nodes[0]),),
        environments=_environments(config, engines) if config.plays_in_environments else (),
        teachers=tuple(teacher_ranks(teacher) for teacher, _ in config.placed_teachers),
    )


def _nodes(config: Config, cores: int, gpus: int | None) -> tuple[Node, ...]:
    """Return the nodes, each with `gpus` GPUs. None: each node has a device for each rank in its equal share."""
    devices = gpus or devices_per_node(config)
    return tuple(Node(i, range(i * devices, (i + 1) * devices), cores) for i in range(config.cluster.nodes))


def check_nodes(config: Config, nodes: Sequence[Node]) -> None:
    """Raise a UserError with one line for each mismatch between ranks and nodes."""
    needed, each = num_devices(config), len(nodes[0].devices)
    key, used = f"cluster.nodes={len(nodes)}", -(-needed // each)
    problems = []
    if len(nodes) > 1 and used > len(nodes):
        problems.append(
            f"{key}: the ranks need {needed} devices, but {len(nodes)} nodes with {counted(each, 'device')} each have "
            f"{len(nodes) * each}. Fix: set cluster.nodes={used}, or lower dp in the layouts"
        )
    if used < len(nodes):
        problems.append(
            f"{key}: the ranks need {needed} devices and each node has {each}, so {len(nodes) - used} of {len(nodes)} "
            f"nodes would be empty. Fix: set cluster.nodes={used}"
        )
    roles = config.cluster.roles
    for role in sorted(roles.on_nodes):
        nodes_of_role = roles.assigned[role]
        on_each = config.num_ranks[role] // len(nodes_of_role)
        if on_each != each or nodes_of_role.stop > len(nodes):
            problems.append(
                f"cluster.roles.{role}={getattr(roles, role)}: this puts {on_each} ranks on each node, but the run has "
                f"{len(nodes)} nodes, numbered from 0, with {each} devices each. Fix: set cluster.roles.{role} to the "
                "nodes that its ranks fill"
            )
    spans = device_spans(config)
    engines = [] if config.is_offline else [("rollout.tp", config.rollout.tp, spans[ENGINE])]
    layouts = [
        (
            f"{entry_prefix(placed)}{layout_key(placed)}.tp",
            placed.layout.tp,
            spans[NAMES[placed.section]][: placed.layout.world_size],
        )
        for placed in config.all_placed
    ]
    for key, tp, span in (*layouts, *engines):
        if tp > each and (tp % each or span.start % each):
            problems.append(
                f"{key}={tp}: a tensor-parallel group larger than a node must fill whole nodes, but {tp} ranks "
                f"starting at device {span.start} do not fill nodes with {each} devices. Fix: set {key} to a "
                f"multiple of {each}, and start the role at a node boundary"
            )
        elif tp <= each and (first := _first_torn(span, tp, each)) is not None:
            problems.append(
                f"{key}={tp}: the tensor-parallel group on devices {first}-{first + tp - 1} crosses a node boundary "
                f"(nodes have {each} devices). Fix: set {key} to a divisor of {each}, and start the role at a "
                f"multiple of {key}"
            )
    raise_all(problems)


def _first_torn(span: range, tp: int, each: int) -> int | None:
    """Return the first device of the first tensor-parallel group that spans several nodes, or None. each: devices per
    node."""
    groups = range(span.start, span.stop, tp)
    return next((first for first in groups if first // each != (first + tp - 1) // each), None)


def _rewards(config: Config, node: Node) -> Process:
    settings = config.rewards
    calls = settings.functions or settings.judge is not None or config.evaluation.sets
    return Process("rewards", 0, (settings.processes or min(node.cores, MAX_USER_PROCESSES)) if calls else 1, node)


def _environments(config: Config, engines: Sequence[Process]) -> tuple[Process, ...]:
    """Return one process per engine. Its `threads` attribute is the number of environment processes that it starts."""
    on_node = Counter(engine.node.number for engine in engines)

    def threads(node: Node) -> int:
        return config.environment.processes or min(MAX_USER_PROCESSES, max(1, node.cores // on_node[node.number]))

    return tuple(Process("environments", engine.index, threads(engine.node), engine.node) for engine in engines)


def _parts(group: Sequence[Process]) -> list[Process]:
    return [part for process in group for part in process.parts]


def _where(group: Sequence[Process]) -> str:
    gpus = [gpu for process in group for gpu in process.gpus]
    if not gpus:
        return ""
    return f" on GPU {gpus[0]}" if len(gpus) == 1 else f" on GPUs {gpus[0]}-{gpus[-1]}"


def _names(group: Sequence[Process]) -> str:
    first, last = group[0], group[-1]
    return first.name if first is last else f"{first.name} to {last.name.rpartition('-')[2]}"
