"""Computes the layer outputs for one token sequence with plain transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def layer_outputs(folder: Path, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the outputs of each stage in the order of the forward pass. The last stage contains the log-probs of all
    tokens except the first, as float32 [T − 1]. Each of the preceding stages contains hidden states for all tokens
    except the last, as float32 [T − 1, hidden]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    outputs: dict[str, np.ndarray] = {}

    def keep(stage: str) -> Callable[..., None]:
        def hook(module, inputs, output) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[stage] = hidden[0].numpy().copy()

        return hook

    model.model.embed_tokens.register_forward_hook(keep("embedding"))
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer {number}"))
    model.model.norm.register_forward_hook(keep("final norm"))
    ids = torch.tensor([list(token_ids)])
    log_probs = model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    return outputs | {"log-probs": log_probs.gather(1, ids[0, 1:, None])[:, 0].numpy()}
