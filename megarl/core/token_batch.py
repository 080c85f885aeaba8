"""A microbatch of tokens: samples packed back to back, in the form that ranks compute with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megarl.core.row_batch import RowBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher's final hidden states or most probable tokens for the rows of a microbatch that the teacher scores, in
    host memory.

    Attributes:
        rows: int64 [n], ascending indices among the microbatch's rows.
        parts: the states of consecutive rows, [n_i, h] in the teacher's dtype, or packed TopTokens, float32
            [n_i, 2k + 1], with Σ n_i = n. They may be views of Ray's object store. Empty if the teacher scores none of
            the rows.
    """

    rows: torch.Tensor
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Images in a microbatch, in host memory. Each image is stored once; if its prompt occurs several times, its
    features have several positions.

    Attributes:
        pixels: function that returns the patches of all images, normalized, float32 [P, channels · time · height ·
            width of a patch]. It runs on the helper thread while the device processes the previous microbatch.
        grids: int64 [I, 3], each image's numbers of patches in time, height and width.
        sources: int64 [F], index of each feature in the tower's output.
        places: int64 [F], pack position of each feature.
    """

    pixels: Callable[[], torch.Tensor]
    grids: torch.Tensor
    sources: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(RowBatch):
    """One microbatch: D documents (one prompt and one response each), packed without padding between them.

    Documents of the same prompt may share a prefix. Shared tokens appear once in the pack, and each document lists the
    positions of its tokens. The pack is in depth-first order: all continuations of a token follow it directly.

    T = tokens in the pack, including padding at the end. N = rows that need a log-prob, ordered by document, then by
    position. The row of a response token is the preceding token, whose hidden state predicts it. S = samples.

    tokens            int64 [T]
    positions         int64 [T]      position within the document
    document_tokens   int64 [Σ len]  positions in the pack of each document's tokens, document after document
    boundaries        int32 [D + 1]  offset of each document in document_tokens; padding, if any, is the last document
    rows              int64 [N]      positions in the pack whose hidden states go through the head
    targets           int64 [N]      sampled token of each row
    candidate_ids     int64 [N, K]   tokens that the engine sampled from, padded with −1; a row of only −1 stands for
                                     the whole vocabulary; None: every row does
    labels            float32 [N]    label of each row's token, NaN if it has none; None: samples have no labels
    rotary_positions  int64 [3, T]   position of each token in time, height and width; None: `positions` on all axes
    images            the images in the pack, in host memory; None: the pack has no images, or this rank has no vision
                      tower
    routes            int8 or int16 [T, layers, experts per token], as in Sample; None: no sample has routes
    teacher_states    each teacher's hidden states or most probable tokens, in the order of teachers.models; empty with
                      a sampled divergence. They stay in host memory, because those of an update may not fit on the
                      device

    The other fields are those of RowBatch, for the response tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    document_tokens: torch.Tensor
    boundaries: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    rotary_positions: torch.Tensor | None = None
    images: ImageBatch | None = None
    routes: torch.Tensor | None = None
    teacher_states: tuple[TeacherStates, ...] = ()

    row_fields: ClassVar[tuple[str, ...]] = (*RowBatch.row_fields, "rows", "targets", "candidate_ids", "labels")
    host_fields: ClassVar[tuple[str, ...]] = ("document_tokens", "boundaries", "images", "teacher_states")

    def validate(self) -> None:
        RowBatch.validate(self)  # super() without arguments fails in a dataclass with slots
        num_tokens, num_rows = len(self.tokens), len(self.rows)
        assert tuple(self.positions.shape) == (num_tokens,), "positions and tokens differ in length"
        rotary = self.rotary_positions
        assert rotary is None or tuple(rotary.shape) == (3, num_tokens), "rotary_positions and tokens differ in length"
        assert self.routes is None or len(self.routes) == num_tokens, "routes and tokens differ in length"
        assert int(self.boundaries[0]) == 0 and int(self.boundaries[-1]) == len(self.document_tokens), (
            "boundaries do not span document_tokens"
        )
        is_covered = self.tokens.new_zeros(num_tokens)
        is_covered[self.document_tokens] = 1
        assert bool(is_covered.all()), "some tokens in the pack have no document"
        assert num_rows == 0 or int(self.rows.max()) < num_tokens, "a row index is outside the pack"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the trainer computes log-probs for sampled tokens.

    Attributes:
        truncates: whether to normalize over the engine's candidate tokens only.
        replays: whether to route tokens to the experts that the engine used.
    """

    temperature: float
    truncates: bool = True
    replays: bool = True
