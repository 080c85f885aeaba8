"""The divergence from teachers on the actor's last stage and, for exact divergences, the teachers' output layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from megarl.config.algorithm_schema import Distillation
from megarl.core import device
from megarl.megatron.model.head import LogProbHead, TeacherDivergence
from megarl.models.folder import read_config, vocab_size
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, output_rows_holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder


def prepare_divergence(
    head: LogProbHead, folders: Sequence[Path | None], distillation: Distillation, dtype: torch.dtype
) -> None:
    """Configure the divergence in the actor's head. If it is exact, load the teachers' output weights from these
    folders. Each rank reads the rows for the tokens in its shard of the actor's output weight. A teacher without a
    folder is the policy or the reference, whose output weight `copy_output_weight` copies in each step. If a teacher
    has fewer tokens than the actor, both distributions are normalized over the teacher's tokens."""
    assert distillation.divergence != "sampled", "the head does not compute a sampled divergence"
    weights, vocab_sizes = None, []
    if distillation.is_exact:
        num_rows = head.output_size_per_partition
        first = dist.get_rank(head.process_group) * num_rows
        own = partial(torch.empty, num_rows, head.input_size, dtype=dtype, device=device.device())
        weights = [own() if folder is None else _load_rows(folder, first, num_rows, dtype) for folder in folders]
        vocab_sizes = [
            head.vocab_size if folder is None else min(head.vocab_size, vocab_size(folder)) for folder in folders
        ]
    head.teachers = TeacherDivergence(distillation.divergence, distillation.beta, weights, vocab_sizes)


@torch.no_grad()
def copy_output_weight(model: GPTModel, number: int) -> None:
    """Copy the model's output weight, or the embedding if they are tied, to the output layer of the teacher with this
    number. Updates will change the model's weight, but the teacher's hidden states belong to the current one."""
    head: Any = model.output_layer
    is_tied = model.share_embeddings_and_output_weights
    head.teachers.weights[number].copy_(model.shared_embedding_or_output_weight() if is_tied else head.weight)


def _load_rows(folder: Path, first: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [first, first + num_rows) of the folder's output weight; rows beyond the vocabulary are 0."""
    hf_config = read_config(folder)
    holder = output_rows_holder(hf_config, first, num_rows, str(dtype).removeprefix("torch."))
    [(name, shape)] = holder.shapes.items()
    weight = torch.empty(shape, dtype=dtype, device=device.device())
    with SafetensorsFolder(folder) as transport:
        plan = make_plan([transport.with_file_dtypes(huggingface_holder(hf_config))], [holder])
        execute(plan.into(holder.name), {name: weight}, transport)
    return weight
