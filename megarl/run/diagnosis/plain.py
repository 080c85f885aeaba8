"""Computes the layer outputs for one token sequence with plain transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.models.families import TRANSFORMERS_TYPES
from megarl.models.folder import read_config
from megarl.models.multimodal import VISION


@torch.no_grad()
def layer_outputs(folder: Path, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the outputs of each stage in the order of the forward pass. The last stage contains the log-probs of all
    tokens except the first, as float32 [T − 1]. Each of the preceding stages contains hidden states for all tokens
    except the last, as float32 [T − 1, hidden]."""
    has_vision = VISION in read_config(folder)
    whole = load_plain(AutoModelForImageTextToText if has_vision else AutoModelForCausalLM, folder, dtype=torch.float32)
    model = whole.model.language_model if has_vision else whole.model
    outputs: dict[str, np.ndarray] = {}

    def keep(stage: str) -> Callable[..., None]:
        def hook(module, inputs, output) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[stage] = hidden[0].numpy().copy()

        return hook

    model.embed_tokens.register_forward_hook(keep("embedding"))
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(keep(f"layer {number}"))
    model.norm.register_forward_hook(keep("final norm"))
    ids = torch.tensor([list(token_ids)])
    log_probs = whole(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    return outputs | {"log-probs": log_probs.gather(1, ids[0, 1:, None])[:, 0].numpy()}


def load_plain(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a model with the transformers class `kind`. This includes families that transformers supports under another
    name. The options are passed to `from_pretrained`."""
    config = read_config(folder)
    if alias := TRANSFORMERS_TYPES.get(config["model_type"]):
        options["config"] = AutoConfig.for_model(alias, **{k: v for k, v in config.items() if k != "model_type"})
    model = kind.from_pretrained(folder, trust_remote_code=False, **options)
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):
            # Megatron and vLLM use this epsilon for latents, while transformers always uses 1e-6.
            module.variance_epsilon = model.config.rms_norm_eps
    return model
