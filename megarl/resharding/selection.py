"""Parameters chosen by patterns of the tensor names that users know: those of the Hugging Face checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from fnmatch import filter as matches

from megarl.resharding.piece import Holder


def select_tensors(key: str, patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Names that match any of the patterns (`*`, `?` and `[…]`, as file names do).

    Raises ValueError for a pattern that matches nothing. key: where the patterns are given, such as actor.frozen.
    """
    selected: set[str] = set()
    for pattern in patterns:
        found = matches(names, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names)[:3]
            raise ValueError(f"{key}: {pattern} matches no tensor of the model; near to it are {', '.join(near)}")
        selected.update(found)
    return selected


def whole_parameters(key: str, selected: Collection[str], holder: Holder) -> list[str]:
    """The holder's parameters that are made of selected tensors, by their local names.

    Raises ValueError for one that is made of selected and of other tensors.
    """
    parts: dict[str, dict[str, None]] = {name: {} for name in holder.shapes}
    for piece in holder.pieces:
        if piece.canonical is not None:
            parts[piece.local][piece.canonical] = None
    chosen = []
    for local, tensors in parts.items():
        inside = [name for name in tensors if name in selected]
        outside = [name for name in tensors if name not in selected]
        if inside and outside:
            raise ValueError(
                f"{key}: it matches {', '.join(inside)} but not {', '.join(outside)}, and the trainer holds these as "
                f"one parameter; match all {len(tensors)} or none"
            )
        if inside:
            chosen.append(local)
    return chosen
