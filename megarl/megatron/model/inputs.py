"""Prepares the model input for a microbatch on this rank, once for all layers and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megarl.core import device
from megarl.core.token_batch import TeacherStates, TokenBatch
from megarl.megatron.context_parallel import ContextShares, context_shares, sum_over_ranks
from megarl.megatron.model.head import HeadRequest, ScoredRows
from megarl.megatron.model.layer_spec import PackedDocuments, uses_transformer_engine
from megarl.megatron.model.mtp import MtpInput
from megarl.megatron.model.vision import ImageInput, VisionTower
from megarl.megatron.routes import Routes
from megarl.ops.packed_attention import documents_of
from megarl.ops.shared_attention import pack_mask


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The model's input for one microbatch.

    Attributes:
        tokens, positions: int64 [1, T/cp], token ids and positions on this context-parallel rank.
        attention: the documents within which tokens attend.
        head: the rows to score among this rank's tokens.
        routes: the experts for this rank's tokens; unused by dense models.
        images: the input of the vision tower; None without images, and on ranks without a tower.
        rows: the batch for the loss, restricted to the N' of its N rows that this rank holds.
        row_numbers: int64 [N'], the indices of these rows in the batch.
        num_rows: N, the number of rows in the unrestricted batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PackedDocuments
    head: HeadRequest
    routes: Routes
    images: ImageInput | None
    rows: TokenBatch
    row_numbers: torch.Tensor
    num_rows: int

    @classmethod
    def of(
        cls,
        batch: TokenBatch,
        sequence_parallel: bool,
        splits_documents: bool,
        window: int | None,
        requires_our_attention: bool,
        trains_mtp: bool,
        vision: VisionTower | None = None,
        needs_gradient: bool = False,
    ) -> ModelInput:
        """Prepare a microbatch.

        Args:
            splits_documents: see `context_shares`.
            window: number of tokens that a token attends to in layers with a sliding window; None without such layers.
            requires_our_attention: see the function in layer_spec.
            trains_mtp: whether this pass trains an MTP layer on this rank.
            vision: this rank's vision tower; None if it has none.
            needs_gradient: whether every trained parameter must receive a gradient from this microbatch.
        """
        on_host = context_shares(batch, splits_documents)
        shares = on_host.to(batch.tokens.device)
        numbers, places = shares.rows(batch)
        rows = batch.take_rows(numbers)
        images = None if vision is None else vision.prepare(batch, on_host.local, needs_gradient)
        attention = _attention(batch, shares, on_host, window, requires_our_attention)
        if images is not None:
            attention.feature_places = images.added.places
        mtp = MtpInput.of(batch, shares.local, numbers, attention) if trains_mtp else None
        return cls(
            tokens=batch.tokens[shares.local][None],
            positions=batch.positions[shares.local][None],
            attention=attention,
            head=HeadRequest(places, rows.targets, rows.candidate_ids, mtp, _scored_rows(batch, numbers)),
            routes=Routes.of(batch, shares.local, sequence_parallel),
            images=images,
            rows=rows,
            row_numbers=numbers,
            num_rows=len(batch.rows),
        )

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Assemble the context-parallel ranks' values, [N', …], into one tensor, [N, …], in batch order. Collective."""
        assembled = values.new_zeros(self.num_rows, *values.shape[1:])
        assembled[self.row_numbers] = values
        return sum_over_ranks(assembled)


def _scored_rows(batch: TokenBatch, numbers: torch.Tensor) -> list[ScoredRows]:
    """Return this rank's rows that each teacher scores, on the device. `numbers`: int64 [N'], the batch rows that this
    rank holds, ascending."""
    if not batch.teacher_states:
        return []
    index = torch.full((len(batch.rows),), -1)
    index[numbers.cpu()] = torch.arange(len(numbers))

    def held(teacher: TeacherStates) -> ScoredRows:
        states = torch.cat(teacher.parts) if teacher.parts else torch.empty(0, 0)
        rows = index[teacher.rows]
        if not (is_held := rows >= 0).all():
            rows, states = rows[is_held], states[is_held]
        return ScoredRows(device.send(rows, numbers.device), device.send(states, numbers.device))

    return list(map(held, batch.teacher_states))


def _attention(
    batch: TokenBatch, shares: ContextShares, on_host: ContextShares, window: int | None, requires_ours: bool
) -> PackedDocuments:
    """Return the attention input for a microbatch. `on_host`: the same shares in host memory.

    Transformer Engine attends within document boundaries, which requires that documents share no prompt. Otherwise our
    own attention reads `documents` and `windowed`, and the rotary embedding treats the pack as a single sequence with
    explicit positions. Packs with images always use explicit positions.
    """
    num_tokens, is_fused = len(batch.tokens), uses_transformer_engine()
    longest, bounds = int(batch.boundaries.diff().max()), device.send(batch.boundaries, batch.tokens.device)
    # Megatron's rotary embedding reads the boundaries on the host, for queries and keys in every layer.
    whole = torch.tensor([0, num_tokens], dtype=torch.int32, device=batch.tokens.device if is_fused else "cpu")
    is_separate = is_fused and not requires_ours and len(batch.document_tokens) == num_tokens
    has_positions = not is_separate or batch.rotary_positions is not None
    sequences, length = (whole, num_tokens) if has_positions else (bounds, longest)
    packed = partial(
        PackedDocuments,
        "thd",
        sequences,
        sequences,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        positions=_rotary_positions(batch)[..., shares.sequence] if has_positions else None,
        boundaries=bounds,
        longest=longest,
    )
    if is_separate:
        return packed()
    parts = (on_host.local, on_host.all) if len(on_host.places) > 1 else ()
    are_shared = len(batch.document_tokens) > num_tokens
    uses_one_kernel = is_fused or (device.on_cuda() and (requires_ours or (are_shared and not parts)))
    describe = partial(
        pack_mask if uses_one_kernel else documents_of,
        batch.document_tokens,
        batch.boundaries,
        *parts,
        device=batch.tokens.device,
    )
    return packed(documents=describe(), windowed=None if window is None else describe(window=window))


def _rotary_positions(batch: TokenBatch) -> torch.Tensor:
    """Return the positions for the rotary embedding, int64 [T] or, with images, [3, T]."""
    return batch.positions if batch.rotary_positions is None else batch.rotary_positions
