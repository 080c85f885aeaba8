"""The gated delta rule, token by token, as arXiv 2412.06464 defines it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def recurrence(query, key, value, decay, beta, boundaries, states=None):
    """Return outputs and final states, as `gated_delta_rule` does."""
    outputs, finals = [], []
    for document, (start, stop) in enumerate(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True)):
        state = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1]) if states is None else states[document]
        for t in range(start, stop):
            state = decay[t].exp()[:, None, None] * state
            error = value[t] - torch.einsum("hkv,hk->hv", state, key[t])
            state = state + torch.einsum("hk,hv->hkv", key[t], beta[t][:, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) / query.shape[-1] ** 0.5)
        finals.append(state)
    return torch.stack(outputs), torch.stack(finals)


def convolution(inputs, weight, boundaries, history=None):
    """Return the outputs of `packed_convolution`, computed document by document with torch's convolution."""
    outputs = []
    for document, (start, stop) in enumerate(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True)):
        before = inputs.new_zeros(weight.shape[1] - 1, inputs.shape[1]) if history is None else history[document]
        rows = torch.cat((before, inputs[start:stop])).T[None]
        outputs.append(F.silu(F.conv1d(rows, weight[:, None], groups=len(weight)))[0].T)
    return torch.cat(outputs)
