"""Write one holder's parameters according to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from megarl.resharding.planning.plan import Copy, Writes
from megarl.resharding.transports.transport import Transport, dtype_name, view


@torch.no_grad()
def execute(writes: Writes, parameters: Mapping[str, torch.Tensor], transport: Transport) -> int:
    """Write the parameters in place and return the number of bytes written. Raise a ValueError, without modifying any
    parameter, if one is missing, unexpected or has the wrong shape, or if two dtypes differ and the plan has no cast
    between them.

    Args:
        writes: the copies and fills into the holder, from plan.into(name).
        parameters: the holder's parameters, exactly those that the plan writes.
        transport: transport that delivers the source rectangles.
    """
    _check_shapes(writes, parameters)
    for copy in writes.copies:
        _check_dtypes(copy, dtype_name(parameters[copy.move.destination.parameter].dtype), transport)
    written = 0
    for copy, source in transport.deliver(writes.copies):
        target = view(parameters[copy.move.destination.parameter], copy.move.destination.rectangle)
        if source is not None:
            # Check, because copy_ would silently broadcast a source of another shape.
            assert source.shape == target.shape, f"cannot copy {tuple(source.shape)} into {tuple(target.shape)}: {copy}"
            target.copy_(source)
        written += target.nbytes
    for fill in writes.fills:
        target = view(parameters[fill.place.parameter], fill.place.rectangle)
        target.zero_()
        written += target.nbytes
    return written


class Assembly:
    """Assembles whole parameters from a plan's copies, each in newly allocated memory on the holder's device.
    `staging_bytes` is the peak size of the incomplete parameters in bytes."""

    def __init__(self, writes: Writes, transport: Transport, device: torch.device):
        assert not writes.fills, "whole parameters have no padding to fill"
        self._writes, self._transport, self._device = writes, transport, device
        self.staging_bytes = 0

    @torch.no_grad()
    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter once its last element has arrived; the caller owns the tensor. Raise a ValueError if two
        dtypes differ and the plan has no cast for them."""
        for copy in self._writes.copies:
            _check_dtypes(copy, copy.move.destination_dtype, self._transport)
        shapes = planned_shapes(self._writes)
        missing = {name: prod(shape) for name, shape in shapes.items()}
        incomplete: dict[str, torch.Tensor] = {}
        for copy, part in self._transport.deliver(self._writes.copies):
            assert part is not None, f"{copy}: the transport wrote it into a live parameter instead of returning it"
            name, rectangle = copy.move.destination
            if name not in incomplete:
                dtype = getattr(torch, copy.move.destination_dtype)
                incomplete[name] = torch.empty(shapes[name], dtype=dtype, device=self._device)
                self.staging_bytes = max(self.staging_bytes, sum(tensor.nbytes for tensor in incomplete.values()))
            view(incomplete[name], rectangle).copy_(part)
            missing[name] -= part.numel()
            if missing[name] == 0:
                yield name, incomplete.pop(name)
        assert not incomplete, f"incomplete parameters: {', '.join(incomplete)}"


def planned_shapes(writes: Writes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each written parameter, inferred from the largest index written along each axis."""
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
            raise ValueError(
                f"{name}: the plan writes this parameter, but the model does not have it. Fix: rebuild the plan for "
                "this model"
            )
        actual = tuple(parameters[name].shape)
        if actual != shape:
            raise ValueError(
                f"{name}: the parameter has shape {actual} in the model, but {shape} in the plan. Fix: rebuild the "
                "plan with this model's config and layout"
            )
    for name in parameters:
        if name not in planned:
            raise ValueError(
                f"{name}: the model has this parameter, but the plan does not cover it. Fix: rebuild the plan for this "
                "model"
            )


def _check_dtypes(copy: Copy, destination_dtype: str, transport: Transport) -> None:
    """Raise a ValueError if the actual dtypes of a copy differ and the plan has no cast for them."""
    move = copy.move
    source_dtype = dtype_name(transport.dtype(copy.source, move.source.parameter))
    actual = source_dtype, destination_dtype
    if source_dtype != destination_dtype and actual != (move.source_dtype, move.destination_dtype):
        raise ValueError(
            f"{move.destination.parameter} is {destination_dtype}, but {move.source.parameter} of {copy.source} is "
            f"{source_dtype}. The plan only casts from {move.source_dtype} to {move.destination_dtype}. "
            "Fix: rebuild the plan with the dtypes of both models"
        )
