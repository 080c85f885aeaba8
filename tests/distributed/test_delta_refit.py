"""Refits that send what has changed: the weights are those of a full refit, whatever happens in between."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.resharding.execute import execute
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.plan import Link
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.transports import delta, delta_p2p
from megarl.resharding.transports.checksum import word_sum
from megarl.resharding.transports.delta_p2p import DeltaRendezvous
from megarl.resharding.transports.p2p import Rendezvous, Sent
from tests.distributed.test_p2p import Case, in_layouts
from tests.forked import run_ranks
from tests.unit.resharding.cases import layout_of

INTEGERS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    """Makes slabs so small that the tiny model's tensors have several; the ranks inherit the size."""
    monkeypatch.setattr(delta_p2p, "SLAB", 100)
    monkeypatch.setattr(delta, "BLOCK", 16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])


def change(parameters: dict[str, torch.Tensor], divisor: int, rest: int, value: int) -> None:
    """Elements that are chosen by their bits get other bits: alike wherever they are. Padding, zero, stays."""
    for tensor in parameters.values():
        own = bits(tensor)
        own.copy_(torch.where((own % divisor == rest) & (own != 0), value, own))


CHANGES = ((9, 4, 0x7FC5), (11, 3, -(2**15)))
"""A NaN with a payload, and in bfloat16 a negative zero."""


class Member:
    def __init__(self, store: dist.Store, rank: int, case: Case):
        self.holder, self.receives = case.members[rank], case.members[rank] in case.destinations
        self._store, self._rank, self._case = store, rank, case
        self.transport, self.parameters = case.open(store, rank, DeltaRendezvous)
        self._meetings = 1

    def meet_again(self) -> None:
        self._meetings += 1
        self.transport = self._case.rendezvous(self._store, DeltaRendezvous, f"refit.{self._meetings}").open(
            self.holder.name, self.parameters, self._case.part(self._rank)
        )

    def refit(self) -> Sent:
        if self.receives:
            execute(self._case.plan.into(self.holder.name), self.parameters, self.transport)
            return self.transport.sent
        return self.transport.send()

    def wrong(self, *changes: tuple[int, int, int]) -> list[str]:
        """Parameters that are not those of the case after these changes."""
        expected = {name: tensor.clone() for name, tensor in self._case.weights[self.holder.name].items()}
        for one in changes:
            change(expected, *one)
        return [name for name, own in self.parameters.items() if not torch.equal(bits(own), bits(expected[name]))]

    def wait_for_all(self, what: str) -> None:
        self._store.add(what, 1)
        while self._store.add(what, 0) < len(self._case.members):
            time.sleep(0.01)


def refit_three_times(store: dist.Store, rank: int, case: Case) -> list[Sent]:
    member = Member(store, rank, case)
    sent, done = [member.refit()], []
    assert not member.wrong()
    for one in CHANGES:
        done.append(one)
        if not member.receives:
            change(member.parameters, *one)
        sent.append(member.refit())
        assert not member.wrong(*done)
    sent.append(member.refit())
    assert not member.wrong(*done)
    member.wait_for_all("done")
    return sent


@in_layouts
def test_two_deltas_in_a_row_are_a_full_refit(layout, vllm_tp, replicas, nodes):
    case = Case(layout, vllm_tp, replicas, 1024, nodes)
    of_sources = run_ranks(len(case.members), refit_three_times, case)[: len(case.sources)]
    full, first, second, unchanged = (list(sent) for sent in zip(*of_sources, strict=True))
    assert all(sent.compared == 0 for sent in full)
    for sent in (first, second):
        assert 0 < sum(s.changed for s in sent) < 0.3 * sum(s.compared for s in sent)
        assert sum(s.num_bytes for s in sent) < 0.9 * sum(s.num_bytes for s in full)
    assert all(sent.changed == 0 < sent.compared for sent in unchanged)


def change_at_random(parameters: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Makes a tenth of the elements, drawn at random, NaNs, zeros of either sign and other numbers."""
    for tensor in parameters.values():
        values = torch.randn(tensor.shape, generator=generator)
        kinds = torch.randint(4, tensor.shape, generator=generator)
        for kind, value in enumerate((torch.nan, 0.0, -0.0)):
            values[kinds == kind] = value
        tensor.copy_(torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, values, tensor))


def refit_beside_a_full_one(store: dist.Store, rank: int, case: Case) -> int:
    """Returns how many elements this member has sent as changes, after refits of deltas and full ones side by side."""
    member = Member(store, rank, case)
    parameters = case.parameters(rank) if member.receives else member.parameters
    full = case.rendezvous(store, Rendezvous, "full").open(member.holder.name, parameters, case.part(rank))
    generator = torch.Generator().manual_seed(rank)
    num_changed = 0
    for _ in range(3):
        num_changed += member.refit().changed
        if member.receives:
            execute(case.plan.into(member.holder.name), parameters, full)
            assert all(torch.equal(bits(own), bits(parameters[name])) for name, own in member.parameters.items())
        else:
            full.send()
            change_at_random(member.parameters, generator)
    member.wait_for_all("done")
    return num_changed


def test_random_changes_arrive_as_a_full_refit_brings_them():
    case = Case(layout_of(tp=2), vllm_tp=1, replicas=2, bucket_bytes=1024, nodes=(1, 2))
    assert all(run_ranks(4, refit_beside_a_full_one, case)[:2])


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors that operators have made since it began and that are left, at most."""

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[StorageWeakRef, int] = {}
        self.num_bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        result = operator(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self._left[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self._left = {storage: size for storage, size in self._left.items() if not storage.expired()}
        self.num_bytes = max(self.num_bytes, sum(self._left.values()))
        return result


def memory_of_refits(store: dist.Store, rank: int, case: Case) -> list[int]:
    """Returns the peak bytes of two refits: of the first, which sends all, and of a delta."""
    member = Member(store, rank, case)
    word_sum(torch.zeros(1))  # makes the weights of all words, once for a process
    peaks = []
    for _ in range(2):
        with PeakMemory() as memory:
            member.refit()
        peaks.append(memory.num_bytes)
        if not member.receives:
            change(member.parameters, *CHANGES[0])
    member.wait_for_all("done")
    return peaks


def test_a_delta_takes_two_buffers_and_what_a_slab_does(monkeypatch):
    """A source also keeps what it has sent."""
    monkeypatch.setattr(delta_p2p, "SLAB", 1000)
    case = Case(layout_of(), vllm_tp=1, replicas=2, bucket_bytes=2**17, vocabulary=16000)
    largest = max(bucket.num_bytes for bucket in case.plan.buckets)
    kept = sum(bucket.num_bytes for bucket in case.plan.buckets)
    (first, again), *receivers = run_ranks(3, memory_of_refits, case)
    slack = largest // 4
    assert kept > 5 * largest, "two buffers are a small part"
    assert first <= kept + 2 * largest + slack
    assert max(again, *chain(*receivers)) <= 2 * largest + slack


def spoilt(store: dist.Store, rank: int, case: Case) -> tuple[str, Sent]:
    """Says what a member sees of a refit into an engine that is not as it was left, and what the next one sends."""
    member = Member(store, rank, case)
    member.refit()
    if member.holder.name == "vllm:0.0":
        bits(member.parameters["model.norm.weight"])[1] ^= 1
    seen = ""
    try:
        member.refit()
    except RuntimeError as error:
        seen = str(error)
    member.wait_for_all("seen")
    member.meet_again()
    sent = member.refit()
    assert not member.wrong()
    member.wait_for_all("done")
    return seen, sent


def test_a_spoilt_receiver_is_named_and_then_gets_all():
    case = Case(layout_of(), vllm_tp=1, replicas=2, bucket_bytes=2**20)
    (_, sent), (seen, _), _ = run_ranks(3, spoilt, case)
    assert "vllm:0.0: model.norm.weight is not what its source has, after 0 changes to" in seen
    assert sent.compared == 0


def rewritten(store: dist.Store, rank: int, case: Case) -> Sent:
    member = Member(store, rank, case)
    member.refit()
    if member.holder.name == "vllm:1.0":
        member.parameters["model.norm.weight"].zero_()
        member.transport.forget()
    sent = member.refit()
    assert not member.wrong()
    member.wait_for_all("done")
    return sent


def test_a_receiver_that_has_rewritten_its_weights_gets_all():
    case = Case(layout_of(), vllm_tp=1, replicas=2, bucket_bytes=1024)
    source, *_ = run_ranks(3, rewritten, case)
    assert source.compared == 0


def test_who_hands_on_sends_all_to_one_that_has_rewritten_its_weights():
    """The first engine brings everything into the node and gets deltas itself."""
    case = Case(layout_of(), vllm_tp=1, replicas=2, bucket_bytes=1024, nodes=(1, 1))
    to_one = make_plan(case.sources, case.destinations[:1], bucket_bytes=1024)
    buckets = [replace(bucket, forwards=(Link(1, 2),)) for bucket in to_one.buckets]
    case.plan = ordered(replace(case.plan, buckets=tuple(buckets)))
    check_plan(case.plan, case.sources, case.destinations)
    source, entry, _ = run_ranks(3, rewritten, case)
    assert source.compared > 0 == source.changed
    assert entry.num_bytes > case.plan.num_bytes // 2 > source.num_bytes
