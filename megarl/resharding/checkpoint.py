"""Describe a Megatron checkpoint as a holder whose parameters are the extents that its ranks wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.resharding.piece import Holder, Piece, Rectangle, Shard, intersect, moved, shape_of, whole


@dataclass(frozen=True, slots=True)
class Extent:
    """A rectangle in a rank's parameter and its position in a checkpoint tensor.

    Attributes:
        key, global_shape: name and shape of the checkpoint tensor.
        offset: start of the rectangle in that tensor. The tensor may have leading axes that the parameter lacks, such
            as the expert axis; an extent spans a single index on each of these axes.
        resizable: whether the stored tensor may have a different length, because other layouts pad the vocabulary
            differently.
    """

    parameter: str
    rectangle: Rectangle
    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    resizable: bool

    @property
    def name(self) -> str:
        """The extent's name, unique in the checkpoint."""
        return f"{self.key}[{', '.join(map(str, self.offset))}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.rectangle)

    @property
    def place(self) -> Rectangle:
        """The extent's rectangle in the checkpoint tensor."""
        return self.to_global(whole(self.shape))

    def to_global(self, rectangle: Rectangle) -> Rectangle:
        """Convert a rectangle in the extent to coordinates in the checkpoint tensor."""
        num_leading = len(self.offset) - len(rectangle)
        leading = tuple((index, index + 1) for index in self.offset[:num_leading])
        spans = zip(rectangle, self.offset[num_leading:], strict=True)
        return (*leading, *((start + offset, stop + offset) for (start, stop), offset in spans))

    def of(self, rectangle: Rectangle) -> Extent | None:
        """Return the part of the extent inside a rectangle of the parameter; None if they are disjoint."""
        common = intersect(self.rectangle, rectangle)
        return None if common is None else self.within(self.to_global(moved(common, self.rectangle, whole(self.shape))))

    def within(self, place: Rectangle) -> Extent | None:
        """Return the part of the extent inside a rectangle of the checkpoint tensor; None if they are disjoint."""
        common = intersect(self.place, place)
        if common is None:
            return None
        local = moved(common, self.place, _origin(len(self.offset)))[len(common) - len(self.rectangle) :]
        rectangle = moved(local, _origin(len(local)), self.rectangle)
        return replace(self, rectangle=rectangle, offset=tuple(start for start, _ in common))


def checkpoint_holder(name: str, ranks: Iterable[tuple[Holder, Sequence[Extent]]], dtypes: Mapping[str, str]) -> Holder:
    """Return the checkpoint as a holder of all ranks' extents. `dtypes` maps checkpoint keys to dtypes."""
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: list[Piece] = []
    extent_dtypes: dict[str, str] = {}
    for holder, extents in ranks:
        tiling = holder.shard.by_parameter()
        for extent in extents:
            assert extent.name not in shapes, f"two ranks write {extent.name}"
            shapes[extent.name], extent_dtypes[extent.name] = extent.shape, dtypes[extent.key]
            pieces += _pieces(extent, tiling.get(extent.parameter, ()))
    return Holder(name, Shard(shapes, tuple(pieces), extent_dtypes))


def as_stored(extents: Sequence[Extent], stored: Mapping[str, Sequence[Rectangle]]) -> list[Extent]:
    """Split the extents along the rectangles that the checkpoint stores for their tensors."""
    return [
        part
        for extent in extents
        for rectangle in stored.get(extent.key, ())
        if (part := extent.within(rectangle)) is not None
    ]


def _pieces(extent: Extent, tiling: Sequence[Piece]) -> Iterable[Piece]:
    for piece in tiling:
        common = intersect(piece.local_rectangle, extent.rectangle)
        if common is not None:
            local = moved(common, extent.rectangle, whole(extent.shape))
            yield Piece(piece.canonical, piece.to_canonical(common), extent.name, local)


def _origin(axes: int) -> Rectangle:
    return ((0, 0),) * axes
