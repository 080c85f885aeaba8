"""A checkpoint in Megatron's format as a holder: tensors with names of their own, in the parts that ranks wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.resharding.piece import Holder, Piece, Rectangle, Shard, intersect, moved, shape_of, whole


@dataclass(frozen=True, slots=True)
class Extent:
    """A rectangle of a rank's parameter, and where it lies in a tensor of the checkpoint.

    key, global_shape  name and shape of that tensor
    offset             where the rectangle begins in it. The tensor may have axes before the parameter's own, such as
                       one of experts; along these an extent is one index thick
    resizable          whether the tensor may be longer, for a vocabulary that is padded for another layout
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
        """The extent's rectangle of the checkpoint's tensor."""
        return self.to_global(whole(self.shape))

    def to_global(self, rectangle: Rectangle) -> Rectangle:
        """Returns the rectangle of the checkpoint's tensor at which a rectangle of the extent lies."""
        num_thin = len(self.offset) - len(rectangle)
        thin = tuple((index, index + 1) for index in self.offset[:num_thin])
        spans = zip(rectangle, self.offset[num_thin:], strict=True)
        return (*thin, *((start + offset, stop + offset) for (start, stop), offset in spans))

    def of(self, rectangle: Rectangle) -> Extent | None:
        """Returns the part of the extent that lies in a rectangle of the parameter, if any."""
        common = intersect(self.rectangle, rectangle)
        return None if common is None else self.within(self.to_global(moved(common, self.rectangle, whole(self.shape))))

    def within(self, place: Rectangle) -> Extent | None:
        """Returns the part of the extent that lies in a rectangle of the checkpoint's tensor, if any."""
        common = intersect(self.place, place)
        if common is None:
            return None
        local = moved(common, self.place, _origin(len(self.offset)))[len(common) - len(self.rectangle) :]
        rectangle = moved(local, _origin(len(local)), self.rectangle)
        return replace(self, rectangle=rectangle, offset=tuple(start for start, _ in common))


def checkpoint_holder(name: str, ranks: Iterable[tuple[Holder, Sequence[Extent]]], dtypes: Mapping[str, str]) -> Holder:
    """Returns the checkpoint as a holder, whose parameters are the extents of all ranks, by their names.

    dtypes   of the checkpoint's tensors, by key
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: list[Piece] = []
    extent_dtypes: dict[str, str] = {}
    for holder, extents in ranks:
        tiling = defaultdict(list)
        for piece in holder.pieces:
            tiling[piece.local].append(piece)
        for extent in extents:
            assert extent.name not in shapes, f"two ranks write {extent.name}"
            shapes[extent.name], extent_dtypes[extent.name] = extent.shape, dtypes[extent.key]
            pieces += _pieces(extent, tiling[extent.parameter])
    return Holder(name, Shard(shapes, tuple(pieces), extent_dtypes))


def as_stored(extents: Sequence[Extent], stored: Mapping[str, Sequence[Rectangle]]) -> list[Extent]:
    """Returns the extents in parts that each lie in one of the rectangles that a key's tensor is stored in."""
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
