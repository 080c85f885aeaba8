"""Sending weights between processes: results, staging memory, and behavior when a member fails."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.resharding.execute import Assembly, execute
from megarl.resharding.families import huggingface_holder, megatron_holders, vllm_holders
from megarl.resharding.piece import Holder
from megarl.resharding.planning import messages
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Link, Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import Bandwidth, Schedule, ordered, schedule
from megarl.resharding.transports import shared_memory
from megarl.resharding.transports.hybrid import HybridTransport, RemoteRendezvous
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.p2p import UNUSED_TAG, PointToPoint, Rendezvous
from megarl.resharding.transports.shared_memory import SharedMemory
from tests.forked import run_ranks
from tests.timing import WAIT_S
from tests.unit.resharding.cases import config_of, layout_of, random_checkpoint
from tests.unit.resharding.planning.test_planner import holder as holder_of


class Allocations(TorchDispatchMode):
    """Count the bytes of tensors that operators allocate."""

    num_bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        result = operator(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in known:
            self.num_bytes += result.untyped_storage().nbytes()
        return result


class Recorder:
    """A process group that records sends and receives in order, as (link, index of the message on the link)."""

    def __init__(self, group: dist.Backend, rank: int):
        self._group, self._rank = group, rank
        self.hops: list[tuple[Link, int]] = []

    def send(self, tensors, receiver, tag):
        self.hops.append((Link(self._rank, receiver), tag))
        return self._group.send(tensors, receiver, tag)

    def recv(self, tensors, sender, tag):
        if tag != UNUSED_TAG:  # skip connection checks, which occur on slow machines
            self.hops.append((Link(sender, self._rank), tag))
        return self._group.recv(tensors, sender, tag)


class Case:
    """A plan and the correct weights of a random model at each of its members."""

    def __init__(
        self,
        layout,
        vllm_tp: int,
        replicas: int,
        bucket_bytes: int,
        nodes: tuple[int, ...] = (),
        vocabulary: int = 37,
        source_nodes: tuple[int, ...] = (),
    ):
        """Make the plan and the weights.

        Args:
            nodes, source_nodes: node of each worker and of each source. Empty: all are on node 0.
        """
        config = config_of(num_key_value_heads=2, vocab_size=vocabulary)
        folder = huggingface_holder(config)
        checkpoint = random_checkpoint(config)
        ranks = [in_dtypes(holder) for holder in megatron_holders(config, layout, vocab_multiple=4)]
        self.sources = [replace(r, node=n) for r, n in zip(ranks, source_nodes or [0] * len(ranks), strict=True)]
        workers = [in_dtypes(holder) for holder in vllm_holders(config, vllm_tp, replicas)]
        self.destinations = [replace(w, node=n) for w, n in zip(workers, nodes or [0] * len(workers), strict=True)]
        self.plan = ordered(make_plan(self.sources, self.destinations, bucket_bytes))
        check_plan(self.plan, self.sources, self.destinations)
        from_folder = make_plan([folder], [replace(holder, node=0) for holder in self.members])
        self.weights = {}
        for holder in self.members:
            self.weights[holder.name] = self.empty(holder)
            local = LocalMemory({folder.name: checkpoint})
            execute(from_folder.into(holder.name), self.weights[holder.name], local)
        self.timeout_s = WAIT_S

    @property
    def members(self) -> list[Holder]:
        return [*self.sources, *self.destinations]

    def empty(self, holder: Holder) -> dict[str, torch.Tensor]:
        return {n: torch.full(s, torch.nan, dtype=getattr(torch, holder.dtypes[n])) for n, s in holder.shapes.items()}

    def open(
        self, store: dist.Store, rank: int, kind: type[Rendezvous] = Rendezvous
    ) -> tuple[PointToPoint, dict[str, torch.Tensor]]:
        """Return a member's transport and parameters. Rank 0 hosts the TCPStore of the rendezvous."""
        if rank == 0:
            self._rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("port", str(self._rendezvous.port))
        parameters = self.parameters(rank)
        transport = self.rendezvous(store, kind, "refit").open(self.members[rank].name, parameters, self.part(rank))
        return transport, parameters

    def parameters(self, rank: int) -> dict[str, torch.Tensor]:
        """Return a member's parameters; those of a destination are not initialized."""
        holder = self.members[rank]
        initial = self.empty(holder) if holder in self.destinations else self.weights[holder.name]
        return {name: tensor.clone() for name, tensor in initial.items()}

    def rendezvous(self, store: dist.Store, kind: type[Rendezvous], name: str) -> Rendezvous:
        return kind("127.0.0.1", int(store.get("port")), name, self.timeout_s)

    def part(self, rank: int) -> Plan:
        return CompactPlan.of(self.plan).part([self.members[rank].name])


def in_dtypes(holder: Holder) -> Holder:
    """Set norms to float32 and all other parameters to bfloat16, so that buckets contain elements of several sizes."""
    dtypes = {name: "float32" if len(shape) == 1 else "bfloat16" for name, shape in holder.shapes.items()}
    return replace(holder, shard=replace(holder.shard, dtypes=dtypes))


def take_part(store: dist.Store, rank: int, case: Case) -> tuple[int, int, list[tuple[Link, int]]]:
    """Exchange weights twice with different values. Return bytes staged, bytes allocated and the recorded hops."""
    holder = case.members[rank]
    receives = holder in case.destinations
    transport, parameters = case.open(store, rank)
    group = transport._group
    for factor in (1, 2):
        transport._group = recorder = Recorder(group, rank)
        if not receives:
            for tensor in parameters.values():
                tensor.mul_(factor)
        with Allocations() as allocations:
            num_bytes = execute(case.plan.into(holder.name), parameters, transport) if receives else transport.send()
        if receives:
            assert num_bytes == sum(tensor.nbytes for tensor in parameters.values())
            wrong = [n for n, t in parameters.items() if not torch.equal(t, factor * case.weights[holder.name][n])]
            assert not wrong
    store.add("done", 1)
    while store.add("done", 0) < len(case.members):  # rank 0 hosts the store that other ranks still use
        time.sleep(0.01)
    return transport.staging_bytes, allocations.num_bytes, recorder.hops


in_layouts = pytest.mark.parametrize(
    ("layout", "vllm_tp", "replicas", "nodes"),
    [
        (layout_of(tp=2), 1, 2, ()),
        (layout_of(pp=2, dp=2), 2, 1, ()),
        (layout_of(pp=2), 1, 2, (1, 1)),
        (layout_of(), 2, 2, (1, 1, 1, 2)),
    ],
    ids=["TP2-two-engines", "PP2-DP2-engine-of-TP2", "two-engines-on-another-node", "engines-on-two-nodes"],
)


@pytest.mark.parametrize(
    "bucket_bytes", [64, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (1024, 2**20))]
)
@in_layouts
def test_weights_arrive_exactly_through_two_buffers(layout, vllm_tp, replicas, nodes, bucket_bytes):
    case = Case(layout, vllm_tp, replicas, bucket_bytes, nodes)
    assert any(bucket.forwards for bucket in case.plan.buckets) == bool(nodes)
    largest = max(bucket.num_bytes for bucket in case.plan.buckets)
    simulated = hops_of_members(schedule(case.plan, Bandwidth(inter=50e9, intra=400e9)))
    for rank, (staged, allocated, hops) in enumerate(run_ranks(len(case.members), take_part, case)):
        assert 0 < staged <= 2 * largest
        assert allocated == staged, "memory was allocated in addition to the buffers"
        assert hops == simulated[rank]


def read_local_and_receive_remote(store: dist.Store, rank: int, case: Case) -> int:
    """Exchange weights twice and return the bytes that the member has sent.

    For the second exchange, local weights are published again, and connections are reused.
    """
    holder = case.members[rank]
    receives, connections = holder in case.destinations, set()
    transport, parameters = (None, case.parameters(rank)) if receives else case.open(store, rank, RemoteRendezvous)
    for factor in (1, 2):
        if not receives:
            for tensor in parameters.values():
                tensor.mul_(factor)
            store.set(f"{holder.name} {factor}", pickle.dumps(shared_memory.publish(parameters)))
            num_bytes = transport.send()
        else:
            local_sources = [source.name for source in case.sources if source.node == holder.node]
            memory = SharedMemory({name: pickle.loads(store.get(f"{name} {factor}")) for name in local_sources})
            channel = HybridTransport(memory, case.rendezvous(store, RemoteRendezvous, "refit"))
            transport = channel.open(holder.name, parameters, case.part(rank))
            connections.add(transport._remote)
            execute(case.part(rank).into(holder.name), parameters, transport)
            assert len(connections) == 1, "the member has reconnected"
            wrong = [n for n, t in parameters.items() if not torch.equal(t, factor * case.weights[holder.name][n])]
            assert not wrong
            num_bytes = transport._remote.sent_bytes
        store.add(f"done {factor}", 1)
        # Wait, because sources must not change their weights while members read them.
        while store.add(f"done {factor}", 0) < len(case.members):
            time.sleep(0.01)
    return num_bytes


@pytest.mark.parametrize(
    ("vllm_tp", "nodes", "bucket_bytes"), [(1, (0, 0, 1, 1), 256), (2, (0, 0, 1, 1), 2**20), (2, (0, 1), 256)]
)
def test_local_weights_are_read_and_only_the_rest_is_sent(vllm_tp, nodes, bucket_bytes):
    """Each of two nodes holds one pipeline stage, and engines on both nodes need both stages."""
    replicas = len(nodes) // vllm_tp
    case = Case(layout_of(pp=2, dp=2), vllm_tp, replicas, bucket_bytes, nodes, source_nodes=(0, 0, 1, 1))
    assert any(bucket.forwards for bucket in case.plan.buckets) == (replicas > 1)
    sent = run_ranks(len(case.members), read_local_and_receive_remote, case)
    crossing = [
        bucket.num_bytes
        for bucket in case.plan.buckets
        for link in bucket.links
        if case.plan.nodes[link.source] != case.plan.nodes[link.destination]
    ]
    forwarded = [bucket.num_bytes for bucket in case.plan.buckets for _ in bucket.forwards]
    assert sum(sent[: len(case.sources)]) == sum(crossing) and sum(sent) == sum(crossing) + sum(forwarded)
    assert case.plan.node_local.num_bytes + sum(sent) == case.plan.num_bytes


@in_layouts
def test_large_moves_are_sent_without_a_copy(monkeypatch, layout, vllm_tp, replicas, nodes):
    """Only the buffers are allocated, and they are smaller than the moves."""
    case = Case(layout, vllm_tp, replicas, 1024, nodes)
    packed = run_ranks(len(case.members), take_part, case)
    monkeypatch.setattr(messages, "UNPACKED_BYTES", 8)
    unpacked = run_ranks(len(case.members), take_part, case)
    assert all(allocated == staged for staged, allocated, _ in unpacked)
    assert sum(staged for staged, *_ in unpacked) < 0.8 * sum(staged for staged, *_ in packed)


def hops_of_members(simulated: Schedule) -> dict[int, list[tuple[Link, int]]]:
    """Return each member's hops in order, as (link, number of earlier uses of the link)."""
    hops, counts = defaultdict(list), Counter()
    for _, link, *_ in simulated.transfers:
        for member in link:
            hops[member].append((link, counts[link]))
        counts[link] += 1
    return hops


def test_scheduled_order_differs_from_plan_order():
    """The tests above can only verify the order if the two orders differ."""
    plan = Case(layout_of(), 2, 2, 64, (1, 1, 1, 2)).plan
    buckets_of_source = [hop.bucket for hop in plan.order if hop.link.source == 0]
    assert buckets_of_source != sorted(buckets_of_source)


def fails_midway(store: dist.Store, rank: int, case: Case) -> str:
    """Let the first destination fail in the second exchange, when all members are connected. Return this member's
    error.
    """
    transport, parameters = case.open(store, rank)
    name = case.members[rank].name

    def exchange() -> None:
        execute(case.plan.into(name), parameters, transport) if name in case.plan.destinations else transport.send()

    exchange()
    message = ""
    try:
        if name == "vllm:0.0":
            for _ in transport.deliver(()):
                raise ValueError("a failure")
        exchange()
    except (RuntimeError, ValueError) as error:
        message = str(error)
    store.add("seen", 1)
    while store.add("seen", 0) < len(case.members):  # exiting earlier would interrupt the waits of other members
        time.sleep(0.01)
    return message


def test_failing_member_interrupts_the_others():
    case = Case(layout_of(), vllm_tp=1, replicas=2, bucket_bytes=256)
    source, failed, other = run_ranks(3, fails_midway, case)
    assert failed == "a failure"
    assert re.match(r"megatron:0: exchange with vllm:0.0: .*by peer", source)
    assert re.match(r"vllm:1.0: exchange with megatron:0: .*by peer", other), (
        "it waits for the source, which has failed"
    )


def killed_midway(store: dist.Store, rank: int, case: Case) -> None:
    if rank == 0:
        transport, _ = case.open(store, rank)
        with pytest.raises(
            RuntimeError, match=r"^megatron:0: exchange with vllm:0.0: .*Connection (closed|reset) by peer"
        ):
            transport.send()
        with pytest.raises(
            RuntimeError, match="megatron:0: the connections are closed because an earlier exchange failed"
        ):
            transport.send()
    elif child := os.fork():
        os.waitpid(child, 0)
    else:
        transport, _ = case.open(store, rank)
        for _ in transport.deliver(()):
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_member_is_detected_at_once():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    run_ranks(2, killed_midway, case)


LARGE = 2**27
"""Size in bytes of a message that does not fit into socket buffers."""
SIGNAL_TAG = 2**30
"""A tag that no transport uses."""


class PartialTransfer:
    """A small message and a large one, which is transferred only in part because its receiver is suspended."""

    names = "source", "engine"

    def __init__(self):
        source, engine = (holder_of(name, ((0, 4),), ((4, 4 + LARGE // 4),)) for name in self.names)
        self.plan = ordered(make_plan([source], [engine], LARGE))
        assert [bucket.num_bytes for bucket in self.plan.buckets] == [16, LARGE]
        self.shapes = source.shapes

    def open(self, store: dist.Store, rank: int) -> PointToPoint:
        if rank == 0:
            self._rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("port", str(self._rendezvous.port))
        rendezvous = Rendezvous("127.0.0.1", int(store.get("port")), "transfer", WAIT_S)
        return rendezvous.open(self.names[rank], {n: torch.zeros(s) for n, s in self.shapes.items()}, self.plan)

    def send(self, store: dist.Store, then: Callable[[psutil.Process], None]) -> None:
        """Send both messages, and call `then` with the receiver's process once part of the large one has arrived."""
        transport = self.open(store, 0)
        inner = transport._send

        def send(message, link):
            if message.bucket == 0:
                return inner(message, link)
            transport._group.recv([torch.zeros(1)], 1, SIGNAL_TAG).wait()
            receiver = psutil.Process(int(store.get("receiver")))
            while receiver.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            pending = inner(message, link)
            then(receiver)
            return pending

        transport._send = send
        transport.send()

    def receive(self, store: dist.Store) -> None:
        store.set("receiver", str(os.getpid()))
        transport = self.open(store, 1)
        for _ in transport.deliver(()):
            transport._group.send([torch.zeros(1)], 0, SIGNAL_TAG).wait()
            os.kill(os.getpid(), signal.SIGSTOP)


def receiver_is_killed(store: dist.Store, rank: int, transfer: PartialTransfer) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"^source: exchange with engine: .*by peer"):
            transfer.send(store, then=psutil.Process.kill)
    elif child := os.fork():
        os.waitpid(child, 0)
    else:
        transfer.receive(store)


def sender_is_killed(store: dist.Store, rank: int, transfer: PartialTransfer) -> None:
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"^engine: exchange with source: .*by peer"):
            transfer.receive(store)
    elif child := os.fork():
        os.waitpid(child, 0)
        psutil.Process(int(store.get("receiver"))).resume()
    else:
        transfer.send(store, then=lambda receiver: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("killed", [receiver_is_killed, sender_is_killed])
def test_death_in_the_middle_of_a_message_is_detected(killed):
    """The error is a broken connection, not a timeout."""
    run_ranks(2, killed, PartialTransfer())


def send_alone(store: dist.Store, rank: int, case: Case) -> str:
    transport, _ = case.open(store, rank)
    with pytest.raises(RuntimeError) as error:
        transport.send()
    return str(error.value)


def test_missing_member_causes_a_timeout():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    case.timeout_s = 1.0
    [error] = run_ranks(1, send_alone, case)
    assert re.match(r"megatron:0: exchange with vllm:0.0: .*timeout", error, re.DOTALL)


def test_gloo_uses_the_first_interface_of_the_variable(monkeypatch):
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=1024)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,and-another")
    run_ranks(2, take_part, case)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-thing")
    with pytest.raises(RuntimeError, match="no-such-thing"):
        case.open(dist.HashStore(), 0)


def test_source_with_an_unplanned_dtype_is_rejected():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    transport, parameters = case.open(dist.HashStore(), 0)
    parameters["chunk0.embedding.word_embeddings.weight"] = torch.zeros(40, 12)
    with pytest.raises(
        ValueError, match=r"word_embeddings.weight of megatron:0 is torch.float32, but the plan expects"
    ):
        transport.send()


def assembled(store: dist.Store, rank: int, case: Case) -> None:
    """Assemble whole parameters; the engine has an unrelated parameter with the same name as one in the plan."""
    holder = case.members[rank]
    if holder in case.sources:
        transport, _ = case.open(store, rank)
        transport.send()
    else:
        other = {"model.norm.weight": torch.zeros(3)}
        transport = case.rendezvous(store, Rendezvous, "refit").open(
            holder.name, other, case.part(rank), in_place=False
        )
        for name, tensor in Assembly(case.plan.into(holder.name), transport, torch.device("cpu")).parameters():
            assert torch.equal(tensor, case.weights[holder.name][name][: len(tensor)])  # without padding
        assert not other["model.norm.weight"].any()
    store.add("done", 1)
    while store.add("done", 0) < len(case.members):
        time.sleep(0.01)


@pytest.mark.parametrize("nodes", [(0,), (1, 1, 1)], ids=["single", "forwarded"])
def test_assembly_of_received_parameters(monkeypatch, nodes):
    """Parameters are assembled in a reused buffer, so a member cannot pack a forwarded bucket from them later."""
    monkeypatch.setattr(messages, "UNPACKED_BYTES", 8)
    case = Case(layout_of(tp=2), vllm_tp=1, replicas=len(nodes), bucket_bytes=256, nodes=nodes)
    assert any(bucket.forwards for bucket in case.plan.buckets) == (len(nodes) > 1)
    case.plan = replace(case.plan, padding=())
    run_ranks(2 + len(nodes), assembled, case)
