"""Base class for dataclasses that hold NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True, slots=True, eq=False)
class HoldsArrays:
    """Base class for dataclasses with array fields. Provides equality, pickling and read-only arrays."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def _freeze(self, name: str, dtype: DTypeLike, axes: int = 1) -> None:
        """Convert a field, given as any sequence, to a read-only array."""
        array = np.asarray(getattr(self, name), dtype).view()
        assert array.ndim == axes, f"{name} has shape {array.shape}"
        array.setflags(write=False)
        object.__setattr__(self, name, array)
