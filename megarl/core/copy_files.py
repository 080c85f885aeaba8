"""Files with copies of a rank's training state in its node's shared memory. Each of two slots has a file with tensors,
and a record that exists only while the tensors are complete. See megarl.megatron.checkpoint.host_copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megarl.core.files import parse_object

SLOTS = (0, 1)


def copy_file(folder: Path, rank: str, slot: int, kind: Literal["json", "tensors", "new"]) -> Path:
    """Return the path of a slot's record, of its tensors, or of a record that is being written. `rank` is the name of
    the rank's process."""
    return folder / f"{rank}.{slot}.{kind}"


def read_record(folder: Path, rank: str, slot: int) -> dict[str, Any] | None:
    """Return the record of a slot, or None if the slot has no complete copy."""
    try:
        return parse_object(copy_file(folder, rank, slot, "json").read_text())
    except FileNotFoundError:
        return None


def slot_of(folder: Path, rank: str, step: int) -> int | None:
    """Return the slot with the rank's copy of the state after `step`, or None if the folder has no such copy."""
    return next((slot for slot in SLOTS if (read_record(folder, rank, slot) or {}).get("step") == step), None)


def discard_after(folder: Path, rank: str, step: int) -> None:
    """Discard the rank's copies of states after steps later than `step`."""
    for slot in SLOTS:
        record = read_record(folder, rank, slot)
        if record is not None and record["step"] > step:
            copy_file(folder, rank, slot, "json").unlink(missing_ok=True)
