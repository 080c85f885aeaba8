"""Weights sent between processes: what arrives, how much is staged for it, and what a member does when another ends."""

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
from megarl.resharding.transports.hybrid import FarRendezvous, HybridTransport
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.p2p import UNUSED_TAG, PointToPoint, Rendezvous
from megarl.resharding.transports.shared_memory import SharedMemory
from tests.forked import run_ranks
from tests.unit.resharding.cases import config_of, layout_of, random_checkpoint
from tests.unit.resharding.planning.test_planner import holder as holder_of

TIMEOUT_S = 100
"""More than anything here takes; who is told of a failure does not wait so long, and says another thing."""


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, other than views."""

    num_bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        result = operator(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in known:
            self.num_bytes += result.untyped_storage().nbytes()
        return result


class Recorder:
    """A process group that notes what is sent and received, in order, as both ends of the hop and its number on it."""

    def __init__(self, group: dist.Backend, rank: int):
        self._group, self._rank = group, rank
        self.hops: list[tuple[Link, int]] = []

    def send(self, tensors, receiver, tag):
        self.hops.append((Link(self._rank, receiver), tag))
        return self._group.send(tensors, receiver, tag)

    def recv(self, tensors, sender, tag):
        if tag != UNUSED_TAG:  # a look at the connection, on a machine that has no time
            self.hops.append((Link(sender, self._rank), tag))
        return self._group.recv(tensors, sender, tag)


class Case:
    """A model in random weights, as it should be at every member of a plan."""

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
        """nodes: of the engines' workers (none given: all are where the sources are, on node 0)."""
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
        self.timeout_s = TIMEOUT_S

    @property
    def members(self) -> list[Holder]:
        return [*self.sources, *self.destinations]

    def empty(self, holder: Holder) -> dict[str, torch.Tensor]:
        return {n: torch.full(s, torch.nan, dtype=getattr(torch, holder.dtypes[n])) for n, s in holder.shapes.items()}

    def open(
        self, store: dist.Store, rank: int, kind: type[Rendezvous] = Rendezvous
    ) -> tuple[PointToPoint, dict[str, torch.Tensor]]:
        """A member's transport and parameters. Rank 0 has the TCPStore that they meet at."""
        if rank == 0:
            self._rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("port", str(self._rendezvous.port))
        own = self.own(rank)
        return self.rendezvous(store, kind, "refit").open(self.members[rank].name, own, self.part(rank)), own

    def own(self, rank: int) -> dict[str, torch.Tensor]:
        """A member's parameters, those of a destination without weights."""
        holder = self.members[rank]
        own = self.empty(holder) if holder in self.destinations else self.weights[holder.name]
        return {name: tensor.clone() for name, tensor in own.items()}

    def rendezvous(self, store: dist.Store, kind: type[Rendezvous], name: str) -> Rendezvous:
        return kind("127.0.0.1", int(store.get("port")), name, self.timeout_s)

    def part(self, rank: int) -> Plan:
        return CompactPlan.of(self.plan).part([self.members[rank].name])


def in_dtypes(holder: Holder) -> Holder:
    """Norms in float32, the others in bfloat16: what travels together has items of several sizes."""
    dtypes = {name: "float32" if len(shape) == 1 else "bfloat16" for name, shape in holder.shapes.items()}
    return replace(holder, shard=replace(holder.shard, dtypes=dtypes))


def take_part(store: dist.Store, rank: int, case: Case) -> tuple[int, int, list[tuple[Link, int]]]:
    """Twice, as the weights of a source change in between. Returns bytes staged, bytes allocated, and the hops."""
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
    while store.add("done", 0) < len(case.members):  # rank 0 has what others still meet at
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


@pytest.mark.parametrize("bucket_bytes", [64, 1024, 2**20])
@in_layouts
def test_arrives_bit_for_bit_through_two_buffers(layout, vllm_tp, replicas, nodes, bucket_bytes):
    case = Case(layout, vllm_tp, replicas, bucket_bytes, nodes)
    assert any(bucket.onward for bucket in case.plan.buckets) == bool(nodes)
    largest = max(bucket.num_bytes for bucket in case.plan.buckets)
    simulated = hops_of_members(schedule(case.plan, Bandwidth(inter=50e9, intra=400e9)))
    for rank, (staged, allocated, hops) in enumerate(run_ranks(len(case.members), take_part, case)):
        assert 0 < staged <= 2 * largest
        assert allocated == staged, "bytes beside the buffers"
        assert hops == simulated[rank]


def read_near_and_far(store: dist.Store, rank: int, case: Case) -> int:
    """Twice; for the second time the near weights are published anew, and the connections stay. Returns the bytes that
    the member has sent."""
    holder = case.members[rank]
    receives, ends = holder in case.destinations, set()
    transport, own = (None, case.own(rank)) if receives else case.open(store, rank, FarRendezvous)
    for factor in (1, 2):
        if not receives:
            for tensor in own.values():
                tensor.mul_(factor)
            store.set(f"{holder.name} {factor}", pickle.dumps(shared_memory.publish(own)))
            num_bytes = transport.send()
        else:
            beside = [source.name for source in case.sources if source.node == holder.node]
            near = SharedMemory({name: pickle.loads(store.get(f"{name} {factor}")) for name in beside})
            channel = HybridTransport(near, case.rendezvous(store, FarRendezvous, "refit"))
            transport = channel.open(holder.name, own, case.part(rank))
            ends.add(transport._far)
            execute(case.part(rank).into(holder.name), own, transport)
            assert len(ends) == 1, "it would connect anew"
            wrong = [n for n, t in own.items() if not torch.equal(t, factor * case.weights[holder.name][n])]
            assert not wrong
            num_bytes = transport._far.sent_bytes
        store.add(f"done {factor}", 1)
        while store.add(f"done {factor}", 0) < len(case.members):  # who gives stays as it is while others read
            time.sleep(0.01)
    return num_bytes


@pytest.mark.parametrize(
    ("vllm_tp", "nodes", "bucket_bytes"), [(1, (0, 0, 1, 1), 256), (2, (0, 0, 1, 1), 2**20), (2, (0, 1), 256)]
)
def test_what_is_near_is_read_and_only_the_rest_travels(vllm_tp, nodes, bucket_bytes):
    """Two nodes with a pipeline stage each, of which the engines on both want both; the last engine lies on both."""
    replicas = len(nodes) // vllm_tp
    case = Case(layout_of(pp=2, dp=2), vllm_tp, replicas, bucket_bytes, nodes, source_nodes=(0, 0, 1, 1))
    assert any(bucket.onward for bucket in case.plan.buckets) == (replicas > 1)
    sent = run_ranks(len(case.members), read_near_and_far, case)
    crossing = [
        bucket.num_bytes
        for bucket in case.plan.buckets
        for link in bucket.links
        if case.plan.nodes[link.source] != case.plan.nodes[link.destination]
    ]
    handed_on = [bucket.num_bytes for bucket in case.plan.buckets for _ in bucket.onward]
    assert sum(sent[: len(case.sources)]) == sum(crossing) and sum(sent) == sum(crossing) + sum(handed_on)
    assert case.plan.near.num_bytes + sum(sent) == case.plan.num_bytes


@in_layouts
def test_large_moves_travel_without_a_copy(monkeypatch, layout, vllm_tp, replicas, nodes):
    """Nothing is allocated but the buffers, and these are smaller."""
    case = Case(layout, vllm_tp, replicas, 1024, nodes)
    by_buffers = run_ranks(len(case.members), take_part, case)
    monkeypatch.setattr(messages, "ALONE_BYTES", 8)
    straight = run_ranks(len(case.members), take_part, case)
    assert all(allocated == staged for staged, allocated, _ in straight)
    assert sum(staged for staged, *_ in straight) < 0.8 * sum(staged for staged, *_ in by_buffers)


def hops_of_members(simulated: Schedule) -> dict[int, list[tuple[Link, int]]]:
    """Returns by member the links that it sends and receives on, each with how often the link was used before."""
    hops, counts = defaultdict(list), Counter()
    for _, link, *_ in simulated.transfers:
        for member in link:
            hops[member].append((link, counts[link]))
        counts[link] += 1
    return hops


def test_the_order_of_the_schedule_is_another_than_that_of_the_plan():
    """The tests above tell the two orders apart only if they differ."""
    plan = Case(layout_of(), 2, 2, 64, (1, 1, 1, 2)).plan
    of_source = [hop.bucket for hop in plan.order if hop.link.source == 0]
    assert of_source != sorted(of_source)


def fails_midway(store: dist.Store, rank: int, case: Case) -> str:
    """Fails at the first destination in the second exchange, when all are connected; returns what each member sees."""
    transport, parameters = case.open(store, rank)
    name = case.members[rank].name

    def exchange() -> None:
        execute(case.plan.into(name), parameters, transport) if name in case.plan.destinations else transport.send()

    exchange()
    seen = ""
    try:
        if name == "vllm:0.0":
            for _ in transport.deliver(()):
                raise ValueError("a failure")
        exchange()
    except (RuntimeError, ValueError) as error:
        seen = str(error)
    store.add("seen", 1)
    while store.add("seen", 0) < len(case.members):  # nobody's end ends another's waiting
        time.sleep(0.01)
    return seen


def test_a_member_that_fails_ends_the_others_waiting():
    case = Case(layout_of(), vllm_tp=1, replicas=2, bucket_bytes=256)
    source, failed, other = run_ranks(3, fails_midway, case)
    assert failed == "a failure"
    assert re.match(r"megatron:0: with vllm:0.0: .*by peer", source)
    assert re.match(r"vllm:1.0: with megatron:0: .*by peer", other), "it waits for the source, which has given up"


def killed_midway(store: dist.Store, rank: int, case: Case) -> None:
    if rank == 0:
        transport, _ = case.open(store, rank)
        with pytest.raises(RuntimeError, match=r"^megatron:0: with vllm:0.0: .*Connection (closed|reset) by peer"):
            transport.send()
        with pytest.raises(RuntimeError, match="megatron:0: its connections are closed since an exchange failed"):
            transport.send()
    elif child := os.fork():
        os.waitpid(child, 0)
    else:
        transport, _ = case.open(store, rank)
        for _ in transport.deliver(()):
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_member_that_is_killed_is_noticed_at_once():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    run_ranks(2, killed_midway, case)


LARGE = 2**27
"""Bytes of a message that sockets do not take as a whole."""
TOLD = 2**30
"""A tag that no transport uses."""


class Halves:
    """A small message and a large one, of which a part travels and then no more: its receiver, which has asked for
    both, has stopped."""

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
        rendezvous = Rendezvous("127.0.0.1", int(store.get("port")), "halves", TIMEOUT_S)
        return rendezvous.open(self.names[rank], {n: torch.zeros(s) for n, s in self.shapes.items()}, self.plan)

    def send(self, store: dist.Store, then: Callable[[psutil.Process], None]) -> None:
        """then: called with the receiver's process, when it has got a part."""
        transport = self.open(store, 0)
        inner = transport._send

        def send(message, link):
            if message.bucket == 0:
                return inner(message, link)
            transport._group.recv([torch.zeros(1)], 1, TOLD).wait()
            receiver = psutil.Process(int(store.get("receiver")))
            while receiver.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            begun = inner(message, link)
            then(receiver)
            return begun

        transport._send = send
        transport.send()

    def receive(self, store: dist.Store) -> None:
        store.set("receiver", str(os.getpid()))
        transport = self.open(store, 1)
        for _ in transport.deliver(()):
            transport._group.send([torch.zeros(1)], 0, TOLD).wait()
            os.kill(os.getpid(), signal.SIGSTOP)


def receiver_is_killed(store: dist.Store, rank: int, halves: Halves) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"^source: with engine: .*by peer"):
            halves.send(store, then=psutil.Process.kill)
    elif child := os.fork():
        os.waitpid(child, 0)
    else:
        halves.receive(store)


def sender_is_killed(store: dist.Store, rank: int, halves: Halves) -> None:
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"^engine: with source: .*by peer"):
            halves.receive(store)
    elif child := os.fork():
        os.waitpid(child, 0)
        psutil.Process(int(store.get("receiver"))).resume()
    else:
        halves.send(store, then=lambda receiver: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("killed", [receiver_is_killed, sender_is_killed])
def test_an_end_in_the_middle_of_a_message_is_noticed(killed):
    """The end is noticed before the time is over, which is said otherwise."""
    run_ranks(2, killed, Halves())


def alone(store: dist.Store, rank: int, case: Case) -> str:
    transport, _ = case.open(store, rank)
    with pytest.raises(RuntimeError) as error:
        transport.send()
    return str(error.value)


def test_nobody_waits_for_ever():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    case.timeout_s = 1.0
    [error] = run_ranks(1, alone, case)
    assert re.match(r"megatron:0: with vllm:0.0: .*timeout", error, re.DOTALL)


def test_the_interface_that_is_named_carries_the_weights(monkeypatch):
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=1024)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,and-another")
    run_ranks(2, take_part, case)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-thing")
    with pytest.raises(RuntimeError, match="no-such-thing"):
        case.open(dist.HashStore(), 0)


def test_a_source_that_is_not_as_planned_says_so():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    transport, parameters = case.open(dist.HashStore(), 0)
    parameters["chunk0.embedding.word_embeddings.weight"] = torch.zeros(40, 12)
    with pytest.raises(ValueError, match=r"megatron:0 has \S+word_embeddings.weight as torch.float32"):
        transport.send()


def assembled(store: dist.Store, rank: int, case: Case) -> None:
    """The engine has a parameter of the plan's name, which is not the plan's."""
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


@pytest.mark.parametrize("nodes", [(0,), (1, 1, 1)], ids=["alone", "handed-on"])
def test_parameters_that_nobody_has_yet_are_put_together(monkeypatch, nodes):
    """What a member hands on after its buffer was another's is not among its parameters."""
    monkeypatch.setattr(messages, "ALONE_BYTES", 8)
    case = Case(layout_of(tp=2), vllm_tp=1, replicas=len(nodes), bucket_bytes=256, nodes=nodes)
    assert any(bucket.onward for bucket in case.plan.buckets) == (len(nodes) > 1)
    case.plan = replace(case.plan, padding=())
    run_ranks(2 + len(nodes), assembled, case)
