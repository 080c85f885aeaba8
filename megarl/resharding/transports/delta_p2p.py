"""Sends messages with only what has changed since the last exchange, where that is fewer bytes; nothing is lost.

A source keeps what it has sent, in host memory that the device copies to and from at full speed. It compares on the
device, slab by slab, and checksums are computed there: no second copy of the weights ever lies on a GPU. Before an
exchange the receivers say whether they still have what was sent: not at their first exchange, nor when their weights
have been rewritten since, and then all is sent. After an error connections are closed, with deltas as without, and at
the next rendezvous all is sent.

A bucket travels in slabs, each whole or as a delta. Before it goes a header: for each slab the number of elements that
change, or WHOLE, and the checksum of what the receiver has to have afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megarl.core import device
from megarl.resharding.planning.plan import Bucket, Link, Plan
from megarl.resharding.transports import delta
from megarl.resharding.transports.bucket_layout import BucketLayout, Part, lay_out_together
from megarl.resharding.transports.checksum import word_sum
from megarl.resharding.transports.p2p import Message, PendingOp, PointToPoint, Rendezvous
from megarl.resharding.transports.transport import Delivery

SLAB = 2**20
"""The elements that are compared at once: more would only take memory."""
WHOLE = -1


@dataclass(frozen=True, slots=True)
class DeltaRendezvous(Rendezvous):
    """The rendezvous of members that send deltas."""

    def open(
        self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True
    ) -> DeltaPointToPoint:
        """Opens a member's end, whose parameters stay as they came: deltas are applied to them."""
        assert in_place, f"{member}: nothing to apply deltas to"
        return DeltaPointToPoint(self, member, parameters, plan)


class DeltaPointToPoint(PointToPoint):
    def __init__(self, rendezvous: Rendezvous, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan):
        super().__init__(rendezvous, member, parameters, plan, in_place=True)
        self._has_last = False
        """Whether this member's weights are those of the last exchange."""
        self._last: dict[int, torch.Tensor] = {}
        """The last state: bucket -> what this source has sent of it."""
        self._sends_deltas = False
        self._headers: dict[int, torch.Tensor] = {}
        """The headers of the buckets of the last exchange."""

    def forget(self) -> None:
        """See Transport."""
        self._has_last = False

    def _lay_out(self, bucket: Bucket) -> BucketLayout:
        return lay_out_together(self._places(bucket))

    def _exchange(self) -> Delivery:
        self._sends_deltas = self._ask_receivers()
        self._has_last = False
        yield from super()._exchange()
        self._has_last = True
        self._remember()

    def _ask_receivers(self) -> bool:
        """Returns whether all receivers have what this member sent last, and tells its own senders the same of
        itself."""
        answers, begun = [], []
        for link in sorted({hop.link for hop in self._hops}):
            if link.source == self._rank:
                answers.append(torch.zeros(1, dtype=torch.uint8, device=self._device))
                begun += self._begin("recv", link, link.destination, answers[-1])
            else:
                answer = torch.tensor([self._has_last], dtype=torch.uint8, device=self._device)
                begun += self._begin("send", link, link.source, answer)
        self._wait(begun)
        return all(answers)

    def _remember(self) -> None:
        """Keeps what this member, if it is a source, has sent. The copies end before `deliver` does."""
        if self._rank >= self._plan.num_sources:
            return
        for number, layout in self._layouts.items():
            if number not in self._last:
                like = torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta")
                self._last[number] = device.host_empty_like(like)
            for part in layout.parts:
                last, now = part.in_buffer(self._last[number]), part.of(self._parameters)
                for old, new in zip(_slabs(last), _slabs(now), strict=True):
                    old.copy_(new, non_blocking=True)

    def _pack(self, message: Message) -> None:
        """Fills the buffer: with deltas where the receivers and this member have the last state, and deltas are
        smaller."""
        header, offset = [], 0
        last = self._last.get(message.bucket) if self._sends_deltas else None
        for part in message.layout.parts:
            old = [None] if last is None else _slabs(part.in_buffer(last))
            for i, slab in enumerate(_slabs(part.of(self._parameters))):
                new = slab.to(part.dtype).flatten()
                encoded, num_changed = self._encoded(new, None if last is None else old[i])
                message.buffer[offset : offset + len(encoded)] = encoded
                offset += len(encoded)
                header += [num_changed, word_sum(new)]
        self._headers[message.bucket] = torch.tensor(header, device=self._device)

    def _encoded(self, new: torch.Tensor, old: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        if old is not None:
            encoded, num_changed = delta.encode(new, old.flatten().to(new.device, non_blocking=True))
            self.sent.compared += len(new)
            self.sent.changed += num_changed
            if len(encoded) < new.nbytes:
                return encoded, num_changed
        return new.view(torch.uint8), WHOLE

    def _send(self, message: Message, link: Link) -> list[PendingOp]:
        header = self._headers[message.bucket]
        if (header[::2] != WHOLE).any() and not self._sends_deltas:  # handed on to one that lacks the last state
            self._pack(message)
            header = self._headers[message.bucket]
        size = self._body_bytes(message.layout, header)
        self.sent.num_bytes += size + header.nbytes
        body = message.buffer[:size]
        # A batch each: its receiver waits for the header before it begins with the body.
        return [begun for tensor in (header, body) for begun in self._begin("send", link, link.destination, tensor)]

    def _receive(self, message: Message, link: Link) -> list[PendingOp]:
        """Begins the receipt of a bucket. It waits for the header: its sender is as far as that, or will be without
        this member's doing."""
        num_slabs = sum(len(_slabs(part.of(self._parameters))) for part in message.layout.parts)
        header = torch.empty(2 * num_slabs, dtype=torch.int64, device=self._device)
        self._wait(self._begin("recv", link, link.source, header))
        self._headers[message.bucket] = header
        body = message.buffer[: self._body_bytes(message.layout, header)]
        return self._begin("recv", link, link.source, body)

    def _body_bytes(self, layout: BucketLayout, header: torch.Tensor) -> int:
        return sum(size for *_, size in self._slabs_of(layout, header))

    def _slabs_of(
        self, layout: BucketLayout, header: torch.Tensor
    ) -> Iterator[tuple[Part, torch.Tensor, int, int, int]]:
        """Yields part, elements, how many of them change, their checksum, and the bytes that travel for them."""
        entries = iter(header.view(-1, 2).tolist())
        for part in layout.parts:
            for slab in _slabs(part.of(self._parameters)):
                num_changed, expected = next(entries)
                whole = slab.numel() * part.dtype.itemsize
                size = whole if num_changed == WHOLE else delta.encoded_bytes(num_changed, slab)
                yield part, slab, num_changed, expected, size

    def _unpacked(self, message: Message) -> Iterator[tuple[Part, None]]:
        """Yields the parts once they are in place and agree with their checksums. Raises RuntimeError that names a
        parameter which has become other than its source's."""
        offset = 0
        for part, slab, num_changed, expected, size in self._slabs_of(message.layout, self._headers[message.bucket]):
            encoded = message.buffer[offset : offset + size]
            offset += size
            if num_changed == WHOLE:
                slab.copy_(encoded.clone().view(part.dtype).view(slab.shape))
            else:
                delta.apply(encoded, num_changed, slab)
            if word_sum(slab) != expected:
                raise RuntimeError(
                    f"{self._member}: {part.place.parameter} is not what its source has, after {max(num_changed, 0)} "
                    f"changes to {slab.numel()} of its elements: it was rewritten since the last refit, or the network "
                    "spoils what it carries"
                )
        for part in message.layout.parts:
            yield part, None


def _slabs(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns runs of the tensor's rows, as views."""
    return tensor.split(max(1, SLAB * len(tensor) // max(1, tensor.numel())))
