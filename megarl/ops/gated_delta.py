"""The gated delta rule and its causal convolution over packed documents, in plain torch.

Each head has a state S, a matrix of keys × values, which starts at zero in every document. A token decays the state,
corrects the value stored under its key, and reads the result with its query (arXiv 2412.06464):

    S ← exp(g) · S,    S ← S + k (β · (v − kᵀS))ᵀ,    o = qᵀS / √keys

On GPU, flash-linear-attention's kernels compute the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

CHUNK = 64
"""Number of tokens per chunk. The outputs of a chunk are computed together, and the state is updated once per chunk."""

NORM_EPS = 1e-6


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide by the L2 norm over the last axis. The delta rule requires normalized queries and keys."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def packed_convolution(
    inputs: torch.Tensor, weight: torch.Tensor, boundaries: torch.Tensor, history: torch.Tensor | None = None
) -> torch.Tensor:
    """Convolve each channel over the preceding tokens of the same document, then apply SiLU. Return [T, channels].

    Args:
        inputs: [T, channels].
        weight: [channels, width]; the last column multiplies the token itself.
        boundaries: int [D + 1], the beginning of each document and the end of the last one.
        history: [D, width − 1, channels], the inputs before each document's first token; None means zeros.
    """
    width, lengths = weight.shape[1], boundaries.diff().long()
    if history is None:
        history = inputs.new_zeros(len(lengths), width - 1, inputs.shape[1])
    places = torch.arange(len(inputs), device=inputs.device)
    places += (width - 1) * torch.arange(1, len(lengths) + 1, device=inputs.device).repeat_interleave(lengths)
    preceding = boundaries[:-1].long().to(inputs.device) + (width - 1) * torch.arange(
        len(lengths), device=inputs.device
    )
    preceding = (preceding[:, None] + torch.arange(width - 1, device=inputs.device)).flatten()
    rows = inputs.new_zeros(len(inputs) + len(preceding), inputs.shape[1])
    rows = rows.index_copy(0, places, inputs).index_copy(0, preceding, history.flatten(0, 1).to(inputs.dtype))
    terms = [rows[places - back] * weight[:, width - 1 - back] for back in range(width)]
    return F.silu(torch.stack(terms).sum(0))


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    boundaries: torch.Tensor,
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, [T, heads, values], and the documents' final states, [D, heads, keys, values] in float32 or
    float64.

    The documents are cut into chunks. Products that do not involve a state are batched over all chunks. Lower-precision
    inputs are converted to float32.

    Args:
        query, key: [T, heads, keys], normalized.
        value: [T, heads, values].
        decay: [T, heads], the logarithm g ≤ 0 of the factor by which a token decays the state.
        beta: [T, heads], the step size from 0 to 1.
        boundaries: int [D + 1], as in `packed_convolution`. No document is empty.
        states: [D, heads, keys, values], the states before each document; None means zeros.
    """
    dtype, chunks = torch.promote_types(value.dtype, torch.float32), _Chunks(boundaries.long().cpu())
    q, k, v, g, b = (chunks.cut(x.to(dtype)) for x in (query, key, value, decay, beta))
    q, b, g = q * q.shape[-1] ** -0.5, b[..., None], g.cumsum(-1)
    # [chunks, heads, i, j]: the decay from token j to token i, zero for later tokens j.
    between = (g[..., None] - g[..., None, :]).masked_fill(chunks.is_later, -torch.inf).exp()
    # Within a chunk, the delta rule's corrected values solve a unit lower triangular system.
    system = ((b * k) @ k.mT * between).tril(-1)
    right = torch.cat((b * v, b * k * g.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    corrected, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores, queries = q @ k.mT * between, q * g.exp()[..., None]
    written, total = k * (g[..., -1:] - g).exp()[..., None], g[..., -1].exp()[..., None, None]
    num_documents = len(boundaries) - 1
    if states is None:
        states = v.new_zeros(num_documents, *v.shape[1:2], k.shape[-1], v.shape[-1])
    current = list(states.to(dtype).unbind())
    outputs: list[torch.Tensor] = [v] * len(v)
    for documents, numbers in chunks.rounds:
        state = torch.stack([current[document] for document in documents])
        values = corrected[numbers] - read[numbers] @ state
        out = queries[numbers] @ state + scores[numbers] @ values
        state = total[numbers] * state + written[numbers].mT @ values
        for i, (document, number) in enumerate(zip(documents, numbers, strict=True)):
            current[document], outputs[number] = state[i], out[i]
    return chunks.join(torch.stack(outputs)).to(value.dtype), torch.stack(current)


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a pack's documents, document by document. The last chunk of a document is padded with zeros, which
    leave its state unchanged."""

    boundaries: torch.Tensor

    @cached_property
    def counts(self) -> list[int]:
        """Number of chunks in each document."""
        return (-(-self.boundaries.diff() // CHUNK)).tolist()

    @cached_property
    def rounds(self) -> list[tuple[list[int], list[int]]]:
        """For each round, the indices of the documents and of the chunks that are processed together. Round i contains
        the i-th chunk of every document that has one."""
        starts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        longer = [[i for i, count in enumerate(self.counts) if count > turn] for turn in range(max(self.counts))]
        return [(documents, [starts[i] + turn for i in documents]) for turn, documents in enumerate(longer)]

    @cached_property
    def places(self) -> torch.Tensor:
        """The index of each token in the concatenated, padded chunks, int64 [T]."""
        lengths = self.boundaries.diff()
        starts = CHUNK * torch.tensor([0, *self.counts]).cumsum(0)[:-1]
        return torch.arange(int(self.boundaries[-1])) + (starts - self.boundaries[:-1]).repeat_interleave(lengths)

    @cached_property
    def is_later(self) -> torch.Tensor:
        """bool [CHUNK, CHUNK], whether token j follows token i."""
        return torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """Split `rows`, [T, heads, …], into zero-padded chunks, [chunks, heads, CHUNK, …]."""
        padded = rows.new_zeros(CHUNK * sum(self.counts), *rows.shape[1:]).index_copy(0, self.places, rows)
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """The inverse of `cut`."""
        return chunks.transpose(1, 2).flatten(0, 1)[self.places]
