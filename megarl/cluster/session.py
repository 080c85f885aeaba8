"""A private Ray cluster for one run, on this machine and on the nodes that join it."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.failure import LostRanks, cause, is_cause, is_loss, rank, write_stacks
from megarl.cluster.network import LOOPBACK, interface_of, own_address, own_name, socket_environment
from megarl.cluster.nodes.gathering import gather
from megarl.cluster.nodes.members import NODE_LOSS_S, Members
from megarl.cluster.nodes.rendezvous import PACKAGES, Invitation, NodeRendezvous
from megarl.cluster.object_store import FLOOR_MIB, object_store_mib
from megarl.cluster.pending import Answers, Pending, outcome
from megarl.cluster.placement import Process
from megarl.cluster.services import STARTS, adapt_node
from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.scratch import ray_folder
from megarl.cluster.supervision.watchdog import Watchdog
from megarl.cluster.trace import Trace
from megarl.config.cluster_schema import TimeoutKind
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.cores import usable_cores
from megarl.core.errors import RunFailure
from megarl.core.versions import installed_versions
from megarl.models.huggingface import Experts

SETTLE_S = 3.0
"""Time in seconds after a first failure for collecting other failures. The cause is among them."""

RAYLET_S = 1.0
"""Seconds to wait for a raylet to exit after its actors."""

CAUSE_S = 30.0
"""Maximum time in seconds to wait for the cause if all known errors are consequences, such as closed connections. An
engine that has lost a rank reports the loss only after it has ended its other ranks, which takes several seconds."""

CHECK_S = 5.0
"""Interval in seconds between pings of idle processes during a wait."""

PING_S = 1.0
"""Timeout of a ping, in seconds. A live process may take longer; for a dead one, Ray returns an error at once."""

MAX_INLINE_BYTES = 4096
"""Maximum size in bytes of a result that Ray sends to the caller. Larger ones, such as samples, stay on their node."""

HEALTH_CHECKS = {
    "health_check_period_ms": 2000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "gcs_rpc_server_reconnect_timeout_s": 30,
}
"""A node counts as lost after 4 · (2 + 5) s without an answer, half of Ray's default. This is shorter than any
collective's deadline, but longer than the processes or the file system of a busy node may stall."""


class Session:
    """The Ray cluster for one run. It starts Ray, watches all pending remote calls and their deadlines, and raises the
    cause of a failure. It runs inside `supervised`, so that remaining processes are terminated."""

    def __init__(
        self,
        config: Config,
        logs: Path,
        scratch: Path,
        rendezvous: Path | None = None,
        routed: Experts | None = None,
        hidden_sizes: Sequence[int] = (),
        encoded: int | None = None,
    ):
        """Start Ray and wait for the other nodes. Raise UserError if a node cannot join, and RunFailure after a
        timeout.

        Args:
            scratch: folder for files that are not needed after the run.
            rendezvous: rendezvous folder for the nodes in a multi-node run.
            routed: the actor's experts; samples may carry their indices.
            hidden_sizes: hidden size of each teacher.
            encoded: size in bytes of the encoded images; see `object_store_mib`.
        """
        self.logs = logs.resolve()
        self._timeouts = config.cluster.timeouts
        self._watched: dict[str, ActorHandle] = {}
        self._replaceable: dict[str, ActorHandle] = {}
        self._pending: list[Pending] = []
        self.trace = Trace(self.logs)
        logging.getLogger("ray").setLevel(logging.ERROR)  # hide advice for cluster administrators
        os.environ.update(
            RAY_AUTH_TOKEN=secrets.token_hex(32),  # otherwise Ray would write a token to the home folder
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # else Ray would hide the GPUs that the placement assigns
        )
        adapt_node()
        if config.cluster.nodes > 1:
            address = own_address(config.cluster.interface)
            print(f"node {own_name()}: {address} ({interface_of(address)})", flush=True)
        else:
            address = LOOPBACK
            ray_constants.ENABLE_RAY_CLUSTER = False  # otherwise Ray would replace the loopback address
        # All other sockets of the run also use this node's Ray address, or its network interface.
        os.environ.update(socket_environment(address))
        terminate = signal.getsignal(signal.SIGTERM)
        store_bytes = object_store_bytes(config, routed, hidden_sizes, encoded)
        try:
            ray.init(
                address="local",
                num_cpus=usable_cores(),
                object_store_memory=store_bytes,
                object_spilling_directory=str(scratch / "spilled"),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(ray_folder(scratch)),
                _node_ip_address=address,
                # Ray's workers run at low priority by default, but here they do the main work.
                _system_config=HEALTH_CHECKS
                | {
                    "worker_niceness": 0,
                    "max_direct_call_object_size": MAX_INLINE_BYTES,
                    "enable_metrics_collection": False,
                },
            )
        except Exception as error:  # Ray does not define a class for this error
            raise RunFailure(
                f"Ray did not start on node {own_name()} in {STARTS} attempts: {error} Fix: resolve this error, or "
                "reduce the node's load"
            ) from error
        # Replace Ray's handler, because it prints a stack trace and skips all cleanup.
        signal.signal(signal.SIGTERM, terminate)
        self._watchdog = Watchdog()
        self.members = Members(ray.get_runtime_context().get_node_id())
        self._placed: dict[int, set[str]] = {}
        """Names of the processes that were placed on each node, by node number."""
        self._rendezvous: NodeRendezvous | None = None
        if config.cluster.nodes > 1:
            assert rendezvous is not None, "a multi-node run has a rendezvous folder"
            self._rendezvous = NodeRendezvous(rendezvous)
            with ExitStack() as stack:
                stack.push(self.__exit__)  # if nodes are missing, shut Ray down as after a run
                self._gather(self._rendezvous, config, store_bytes)
                stack.pop_all()

    def _gather(self, rendezvous: NodeRendezvous, config: Config, store_bytes: int) -> None:
        """Wait until all nodes have joined."""
        host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
        print(f"Ray: head node at {host}:{port}", flush=True)
        token, versions = os.environ["RAY_AUTH_TOKEN"], installed_versions(PACKAGES)
        invitation = Invitation(
            id=secrets.token_hex(8),
            host=host,
            port=int(port),
            token=token,
            versions=versions,
            gpus=device.num_gpus(),
            object_store=store_bytes,
            logs=str(self.logs),
            grace_s=config.checkpoint.grace_s,
        )
        rendezvous.invite(invitation)
        run_folder = str(self.logs.parents[1])
        others = gather(rendezvous, config.cluster.nodes - 1, self._timeouts.start, run_folder)
        self.members = Members(self.members.ray_id(0), others, rendezvous)

    def on_node(self, actor_class: Any, process: Process) -> Any:
        """Return the actor class with options that start it on this process's node."""
        return actor_class.options(scheduling_strategy=self.node_of(process))

    def node_of(self, process: Process) -> NodeAffinitySchedulingStrategy:
        """Return the scheduling strategy that starts an actor on this process's node."""
        self._placed.setdefault(process.node.number, set()).add(process.name)
        return NodeAffinitySchedulingStrategy(self.members.ray_id(process.node.number), soft=False)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._watchdog.stop()
        # A signal to the whole process group has also killed Ray's processes, so a shutdown would hang.
        if kind is not KeyboardInterrupt:
            ray.shutdown()
        if self._rendezvous is not None:
            self._rendezvous.withdraw()  # last, because a node that leaves while Ray runs counts as lost

    def watch(self, actors: Mapping[str, ActorHandle], are_replaceable: bool = False) -> None:
        """Make every subsequent wait fail if any of these processes is lost, including waits for other processes. If
        replaceable processes are lost, a wait raises LostRanks, but only while one of them has a pending call."""
        if are_replaceable:
            self._replaceable |= actors
        else:
            self._watched |= actors

    def unwatch(self, names: Collection[str]) -> None:
        """Stop watching these processes. After that, a loss fails only the calls to the lost process."""
        for name in names:
            self._watched.pop(name, None)

    def submit(
        self, calls: Mapping[str, ray.ObjectRef], phase: str, timeout: TimeoutKind, may_fail: Collection[str] = ()
    ) -> Pending[Answers]:
        """Register these remote calls, and return the future for their results.

        Args:
            calls: one call per process, by process name.
            phase: what the driver waits for, as shown in error messages.
            timeout: the key in cluster.timeouts that bounds the wait.
            may_fail: processes whose loss does not end the run. Errors in other processes that follow from such a loss
                do not end the run either.
        """
        pending = Pending(self, calls, phase, timeout, self._timeouts.seconds(timeout), may_fail)
        self._pending.append(pending)
        return pending

    def wait(self, wanted: Pending, meanwhile: Callable[[], object] | None) -> None:
        """Wait until any pending call finishes, for at most CHECK_S seconds. If no specific call has failed, errors
        name `wanted`, the Pending that the caller waits for."""
        self._pending = [pending for pending in self._pending if pending.unfinished]
        self._watchdog.phase = wanted.phase
        most_urgent = min(self._pending, key=lambda pending: pending.deadline)
        remaining = most_urgent.deadline - time.monotonic()
        ended = self._ended(timeout_s=min(max(remaining, 0.0), CHECK_S))
        if not ended:
            wanted.errors |= self._lost(set(self._watched).difference(self._working()))
        self._raise_failure(wanted)
        if not ended and remaining <= 0:
            names = set(most_urgent.unfinished.values())
            message = self._overdue(most_urgent)
            if names <= self._replaceable.keys():
                raise self._lost_ranks(message)
            raise RunFailure(message)
        if not ended and meanwhile is not None:
            meanwhile()

    def _ended(self, timeout_s: float) -> bool:
        """Wait until a call finishes, and record all finished calls. Return whether any call has finished."""
        refs = [ref for pending in self._pending for ref in pending.unfinished]
        if not ray.wait(refs, timeout=timeout_s)[0]:
            return False
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for pending in self._pending:
            pending.take(set(ended))
        return True

    def _working(self) -> list[str]:
        """Return the names of the processes with pending calls."""
        return [name for pending in self._pending for name in pending.unfinished.values()]

    def _raise_failure(self, wanted: Pending) -> None:
        """Raise the most informative error, if anything has failed."""
        if any(pending.errors and not pending.lost for pending in self._pending):
            self._settle(wanted)
            self._await_cause(wanted)
        if not (failed := self._failed()):
            return
        all_errors = [error for pending in self._pending for error in pending.errors.values()]
        # Processes that communicate with a lost node, or read its object store, may fail before Ray notices the loss.
        users = any(rank(error) == 0 for error in all_errors)
        lost = self.members.lost(0.0 if users else NODE_LOSS_S)
        if len(self.members) > 1 and not lost and not users:
            self._settle(wanted)  # processes on other nodes, such as a shard of a multi-node engine, may also be lost
            if not (failed := self._failed()):
                return
        for pending in failed:
            write_stacks(pending.fatal_errors(), self.logs)
        dead = {name for pending in failed for name, error in pending.fatal_errors().items() if is_loss(error)}
        is_replaceable = dead <= self._replaceable.keys() and not users
        if lost:
            raise self._lost_nodes(lost, f"{failed[0].phase}: ", is_replaceable)
        error = cause(failed[0].fatal_errors(), failed[0].phase, self.logs)
        if dead and is_replaceable:
            raise self._lost_ranks(str(error))
        raise error

    def _lost_nodes(self, lost: Sequence[int], phase: str, is_replaceable: bool = True) -> RunFailure:
        """Return the error for lost nodes: LostRanks if spare nodes can replace them. `is_replaceable`: whether all
        failed processes, on all nodes, can be replaced."""
        names = list(map(self.members.name, lost))
        if self._rendezvous is not None:
            self._rendezvous.note_lost(names)
        message = f"{phase}lost {', '.join(f'node {name}' for name in names)}. See {self.logs}"
        others, num_spares = self.not_replaceable(lost), len(self.members.spare_nodes())
        if not self._replaceable or not is_replaceable:
            reason = ""
        elif others:
            reason = (
                ". A spare node can replace only a node that runs nothing but ranks of trained models, but "
                f"{', '.join(others)} also ran there"
            )
        elif num_spares < len(lost):
            reason = f". {num_spares} of {len(lost)} required spare nodes have joined the run"
        else:
            return self._lost_ranks(message)
        return RunFailure(f"{message}{reason}. Fix: replace these nodes and resume the run")

    def not_replaceable(self, numbers: Collection[int]) -> list[str]:
        """Return the names of the processes on these nodes that a spare node cannot take over."""
        placed = {name for number in numbers for name in self._placed.get(number, ())}
        return [*(["the driver"] if 0 in numbers else []), *sorted(placed - self._replaceable.keys())]

    def replace_lost_nodes(self) -> Sequence[int]:
        """Replace lost and dismissed nodes with spare nodes that take over their numbers. Return the numbers. Raise
        RunFailure if this is impossible."""
        if lost := self.members.lost():
            error = self._lost_nodes(lost, "")
            if not isinstance(error, LostRanks):
                raise error
            self.members.replace(lost)
        return lost

    def _lost_ranks(self, message: str) -> LostRanks:
        """Return the error for lost replaceable processes, and drop their calls and all failed calls."""
        self._pending = [
            pending
            for pending in self._pending
            if not pending.fatal_errors() and not self._replaceable.keys() & pending.unfinished.values()
        ]
        return LostRanks(message)

    def _failed(self) -> list[Pending]:
        """Return the Pendings with errors that end the run, sorted so that the most informative error comes first."""
        failed = [pending for pending in self._pending if pending.fatal_errors()]
        return sorted(failed, key=lambda pending: min(map(rank, pending.fatal_errors().values())))

    def _settle(self, wanted: Pending) -> None:
        """Record the errors that follow shortly after the first one, and lost processes that no call has noticed. One
        of them is the cause. Does not return if Ray itself is lost."""
        failing = [pending for pending in self._pending if pending.errors and not pending.lost]
        names = {name for pending in failing for name in pending.errors}
        # The ranks of a model fail together, and the cause is among them. Other processes may run much longer.
        are_ranks = names <= self._replaceable.keys()
        awaited = failing if are_ranks else self._pending
        deadline = time.monotonic() + SETTLE_S
        while any(pending.unfinished for pending in awaited) and (left := deadline - time.monotonic()) > 0:
            # Losing one rank replaces all of them, and ranks that wait for a lost rank never return.
            if are_ranks and _have_loss(awaited):
                break
            self._ended(left)
        begin = time.monotonic()
        failed = {name for pending in self._pending for name in pending.errors}
        wanted.errors |= self._lost({*self._watched, *self._replaceable}.difference(failed))
        if _have_loss(self._pending):
            # The actors of a raylet exit before the raylet itself: wait, and check whether Ray is lost.
            time.sleep(max(0.0, begin + RAYLET_S - time.monotonic()))
            self._watchdog.check()

    def _await_cause(self, wanted: Pending) -> None:
        """If all errors are consequences, wait until a cause is known or the other calls of the failed Pendings have
        finished, for at most CAUSE_S seconds."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            failing = [pending for pending in self._pending if pending.errors]
            refs = [ref for pending in failing for ref in pending.unfinished]
            if not refs or any(is_cause(error) for pending in failing for error in pending.fatal_errors().values()):
                return
            if not self._ended(PING_S):
                wanted.errors |= self._lost({*self._watched, *self._replaceable}.difference(self._working()))

    def _overdue(self, pending: Pending) -> str:
        """Return a message with the overdue processes, the files with their stacks, and the key of the deadline."""
        names = list(pending.unfinished.values())
        logs = [file for name in names for file in (self.logs / f"{name}.log", *self.logs.glob(f"{name}.*.log"))]
        if self._rendezvous is not None:
            self._rendezvous.request_stacks(logs)
        files = processes.request_stacks(logs, elsewhere=len(self.members) > 1)
        seen = f"Their stacks are at the end of {', '.join(map(str, files))}" if files else f"See {self.logs}"
        return (
            f"{pending.phase}: no response from {', '.join(names)} within {pending.timeout_s:g} s. {seen}. Fix: if "
            f"they only need more time, raise cluster.timeouts.{pending.timeout}"
        )

    def _lost(self, idle: Collection[str]) -> dict[str, Exception]:
        """Return the errors of idle processes that have died."""
        actors = self._watched | self._replaceable
        pings: dict[ray.ObjectRef, str] = {actors[name].__ray_ready__.remote(): name for name in idle}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=PING_S) if pings else ([], [])
        return {pings[ref]: error for ref in answered if (error := outcome(ref)[1]) is not None}


def _have_loss(pendings: Sequence[Pending]) -> bool:
    return any(is_loss(error) for pending in pendings for error in pending.errors.values())


def object_store_bytes(
    config: Config, routed: Experts | None, hidden_sizes: Sequence[int] = (), encoded: int | None = None
) -> int:
    """Return the size of Ray's object store in bytes. A size derived from the batch is limited to nine tenths of the
    machine's free shared memory, because Ray would place a larger store on disk."""
    wanted = object_store_mib(config, routed, hidden_sizes, encoded)
    if config.cluster.object_store_mib is None:
        wanted = min(wanted, max(FLOOR_MIB, 9 * shutil.disk_usage(segments.SHARED_MEMORY).free // 10 // 2**20))
    return wanted * 2**20
