"""Reads parameters that another process of this machine publishes, where they lie."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megarl.resharding.piece import Rectangle
from megarl.resharding.transports.transport import Readable, view

S = TypeVar("S")
"""A segment: how another process finds the storage that a parameter lies in."""


@dataclass(frozen=True, slots=True)
class PublishedParameter(Generic[S]):
    """The place of a live parameter; offset and stride are in elements."""

    segment: S
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, segment: S) -> PublishedParameter[S]:
        return cls(segment, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


Published = Mapping[str, PublishedParameter[S]]
"""The published parameters of one owner, by name."""


class PublishedMemory(Readable, Generic[S]):
    """The parameters that several owners have published. The kind of segment says how it is opened."""

    def __init__(self, sources: Mapping[str, Published[S]]):
        """sources: by holder name."""
        self._sources = sources

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return self._published(source, parameter).dtype

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        published = self._published(source, parameter)
        storage = self._opened(source, published.segment)
        tensor = torch.empty(0, dtype=published.dtype, device=storage.device)
        return view(tensor.set_(storage, published.offset, published.shape, published.stride), rectangle)

    @abstractmethod
    def _opened(self, source: str, segment: S) -> torch.UntypedStorage:
        """Returns the storage, in this process."""

    def _published(self, source: str, parameter: str) -> PublishedParameter[S]:
        try:
            return self._sources[source][parameter]
        except KeyError:
            raise ValueError(f"{source} has published no parameter {parameter}") from None
