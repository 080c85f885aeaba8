"""Describes a Megatron checkpoint as text or JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megarl.config.saved import validated
from megarl.core.checkpoint import Checkpoint
from megarl.core.files import read_foreign_object
from megarl.megatron.checkpoint.source import DESCRIPTION, companion_prefix, is_of_a_run, model_path
from megarl.resharding.piece import num_bytes
from megarl.resharding.transports.torch_dist import TorchDistFolder


@dataclass(frozen=True)
class Description:
    """A checkpoint's content.

    Attributes:
        model: the model_type or, for a run's checkpoint, the weights that its role started from; None if not recorded.
        files: file name -> size in bytes.
        tensors: key -> shape, dtype, and number of stored parts.
    """

    checkpoint: str
    model: str | None
    num_parameters: int
    num_bytes: int
    companions: list[str]
    files: dict[str, int]
    tensors: dict[str, tuple[tuple[int, ...], str, int]]

    def text(self) -> str:
        """Return the description as text: one line per kind of content, then one line per tensor."""
        dtypes = Counter(dtype for _, dtype, _ in self.tensors.values())
        lines = [
            f"{self.checkpoint}: {self.model or 'unknown model'}",
            f"  {self.num_parameters:,} parameters, {self.num_bytes / 1e9:.3f} GB in {len(self.files)} files",
            f"  {len(self.tensors)} tensors: {', '.join(f'{count} {dtype}' for dtype, count in dtypes.items())}",
            *(f"  {prefix}*: one tensor per parameter" for prefix in self.companions),
        ]
        rows = [f"  {key}  {list(shape)}  {dtype}  in {n}" for key, (shape, dtype, n) in self.tensors.items()]
        return "\n".join([*lines, *rows])


def describe(path: Path) -> Description:
    """Describe the checkpoint at `path`. Raise a UserError if `path` is not a complete checkpoint."""
    path = model_path(path)
    with TorchDistFolder(path) as folder:
        tensors = {key: (tensor.shape, tensor.dtype, len(tensor.rectangles)) for key, tensor in folder.tensors.items()}
        prefixes = {key: companion_prefix(key, tensors) for key in tensors}
        parameters = [tensors[key][0] for key, prefix in prefixes.items() if prefix is None]
        return Description(
            str(path),
            _model(path),
            sum(map(prod, parameters)),
            sum(num_bytes(shape, dtype) for shape, dtype, _ in tensors.values()),
            sorted({prefix for prefix in prefixes.values() if prefix is not None}),
            folder.files,
            dict(sorted(tensors.items())),
        )


def _model(path: Path) -> str | None:
    if is_of_a_run(path):
        checkpoint = Checkpoint.open(path.parent)
        config = validated(checkpoint.state.get("config"), checkpoint.format, path)
        start = getattr(getattr(config, path.name), "path", None) or config.model.path
        return f"{path.name} of a run at step {checkpoint.step}, initialized from {start}"
    description = path / DESCRIPTION / "config.json"
    return str(read_foreign_object(description).get("model_type")) if description.is_file() else None
