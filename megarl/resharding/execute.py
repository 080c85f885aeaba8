"""Carries out the part of a plan that writes into one holder: a loop over data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from megarl.resharding.planning.plan import Copy, Writes
from megarl.resharding.transports.transport import Transport, dtype_name, view


@torch.no_grad()
def execute(writes: Writes, parameters: Mapping[str, torch.Tensor], transport: Transport) -> int:
    """Writes the parameters in place. Returns the bytes written.

    writes      the copies and fills of the holder whose parameters these are: plan.into(its name)
    parameters  exactly those that are written

    Raises ValueError, before anything is written, for a parameter that is missing, unexpected, or of another shape
    than the plan has, and for dtypes that differ without a cast in the plan.
    """
    _check_shapes(writes, parameters)
    for copy in writes.copies:
        _check_dtypes(copy, dtype_name(parameters[copy.move.destination.parameter].dtype), transport)
    written = 0
    for copy, source in transport.deliver(writes.copies):
        target = view(parameters[copy.move.destination.parameter], copy.move.destination.rectangle)
        if source is not None:
            # copy_ would broadcast a source of another shape.
            assert source.shape == target.shape, f"{tuple(source.shape)} into {tuple(target.shape)}: {copy}"
            target.copy_(source)
        written += target.nbytes
    for fill in writes.fills:
        target = view(parameters[fill.place.parameter], fill.place.rectangle)
        target.zero_()
        written += target.nbytes
    return written


class Assembly:
    """The parameters that a plan writes into a holder and that nobody has yet: each is put together in memory of its
    own, on the holder's device.

    staging_bytes   bytes of parameters that were incomplete at once, at most
    """

    def __init__(self, writes: Writes, transport: Transport, device: torch.device):
        assert not writes.fills, "only what is no copy has fills"
        self._writes, self._transport, self._device = writes, transport, device
        self.staging_bytes = 0

    @torch.no_grad()
    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each parameter when its last element has come; it is the caller's to keep. Raises ValueError for
        dtypes that differ without a cast in the plan."""
        for copy in self._writes.copies:
            _check_dtypes(copy, copy.move.destination_dtype, self._transport)
        shapes = planned_shapes(self._writes)
        missing = {name: prod(shape) for name, shape in shapes.items()}
        begun: dict[str, torch.Tensor] = {}
        for copy, part in self._transport.deliver(self._writes.copies):
            assert part is not None, f"{copy}: delivered into parameters that are not the plan's"
            name, rectangle = copy.move.destination
            if name not in begun:
                dtype = getattr(torch, copy.move.destination_dtype)
                begun[name] = torch.empty(shapes[name], dtype=dtype, device=self._device)
                self.staging_bytes = max(self.staging_bytes, sum(tensor.nbytes for tensor in begun.values()))
            view(begun[name], rectangle).copy_(part)
            missing[name] -= part.numel()
            if missing[name] == 0:
                yield name, begun.pop(name)
        assert not begun, f"incomplete: {', '.join(begun)}"


def planned_shapes(writes: Writes) -> dict[str, tuple[int, ...]]:
    """Returns parameter -> shape, as the places that are written reach to the end of every axis."""
    shapes: dict[str, tuple[int, ...]] = {}
    places = (*(copy.move.destination for copy in writes.copies), *(fill.place for fill in writes.fills))
    for parameter, rectangle in places:
        stops = tuple(stop for _, stop in rectangle)
        shapes[parameter] = tuple(map(max, shapes.get(parameter, stops), stops))
    return shapes


def _check_shapes(writes: Writes, parameters: Mapping[str, torch.Tensor]) -> None:
    planned = planned_shapes(writes)
    for name, shape in planned.items():
        if name not in parameters:
            raise ValueError(f"{name}: the plan writes it, but the model has no such parameter")
        actual = tuple(parameters[name].shape)
        if actual != shape:
            raise ValueError(f"{name}: the model's parameter has shape {actual}, the plan's {shape}")
    for name in parameters:
        if name not in planned:
            raise ValueError(f"{name}: the model has this parameter, but the plan does not write it")


def _check_dtypes(copy: Copy, ours: str, transport: Transport) -> None:
    """Raises ValueError for dtypes that differ without a cast in the plan. ours: of the parameter that is written."""
    move = copy.move
    theirs = dtype_name(transport.dtype(copy.source, move.source.parameter))
    if theirs != ours and (theirs, ours) != (move.source_dtype, move.destination_dtype):
        raise ValueError(
            f"{move.destination.parameter} is {ours}, but {copy.source} has {move.source.parameter} as {theirs}; "
            f"the plan is from {move.source_dtype} to {move.destination_dtype}"
        )
