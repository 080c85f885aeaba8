"""Read parameters published by another process on this machine, without staging."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megarl.resharding.piece import Rectangle
from megarl.resharding.transports.transport import Readable, view

S = TypeVar("S")
"""The type of a segment: a handle that lets another process open a parameter's storage."""


@dataclass(frozen=True, slots=True)
class PublishedParameter(Generic[S]):
    """The location of a live parameter in its storage. Offset and stride are in elements."""

    segment: S
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, segment: S) -> PublishedParameter[S]:
        return cls(segment, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)


Published = Mapping[str, PublishedParameter[S]]
"""One owner's published parameters: parameter name -> published parameter."""


class PublishedMemory(Readable, Generic[S]):
    """Parameters published by one or more owners. Each subclass opens one kind of segment."""

    def __init__(self, sources: Mapping[str, Published[S]]):
        """`sources` maps holder names to published parameters."""
        self._sources = sources

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return self._published(source, parameter).dtype

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        published = self._published(source, parameter)
        storage = self._open_storage(source, published.segment)
        tensor = torch.empty(0, dtype=published.dtype, device=storage.device)
        return view(tensor.set_(storage, published.offset, published.shape, published.stride), rectangle)

    @abstractmethod
    def _open_storage(self, source: str, segment: S) -> torch.UntypedStorage:
        """Return the storage, mapped into this process."""

    def _published(self, source: str, parameter: str) -> PublishedParameter[S]:
        try:
            return self._sources[source][parameter]
        except KeyError:
            raise ValueError(f"{source} has not published parameter {parameter}") from None
