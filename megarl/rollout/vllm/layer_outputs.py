"""Record the output of each layer in an engine's model for one sequence.

The process must set the variables in `environment` before it imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from megarl.config.schema import Config
from megarl.rollout.vllm import multimodal_models
from megarl.rollout.vllm.engine_arguments import rollout_arguments


def layer_outputs(config: Config, folder: Path, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the outputs in order of computation: stage -> float32 [T − 1, hidden] for all tokens except the last. The
    last stage, "log-probs", is float32 [T − 2]: the log-probs of all tokens except the first and the last. `config`
    must describe a single-rank engine that loads its weights from the model folder."""
    model, pixels = config.model, (config.data.min_pixels, config.data.max_pixels) if config.model.vision else None
    arguments = rollout_arguments(
        config.rollout, folder, model.dtype, config.run.seed, head_dtype=model.head_dtype, pixels=pixels
    )
    arguments["enforce_eager"] = True  # compiled layers do not call hooks
    multimodal_models.install()  # vLLM inspects the model's class before it imports the worker's extension
    engine = LLM(**arguments)
    engine.collective_rpc(_register_hooks)
    context = list(token_ids[:-1])
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [result] = engine.generate([TokensPrompt(prompt_token_ids=context)], sampling, use_tqdm=False)
    [outputs] = engine.collective_rpc(_take)
    rows = zip(result.prompt_logprobs or (), context, strict=True)
    log_probs = np.array([row[token].logprob for row, token in rows if row is not None], np.float32)
    return {stage: values[: len(context)] for stage, values in outputs.items()} | {"log-probs": log_probs}


def _register_hooks(worker: Any) -> None:
    """Register hooks that record the output of each layer's first call."""
    whole, outputs = worker.model_runner.get_model(), {}
    model = getattr(whole, "language_model", whole).model
    worker.layer_outputs = outputs

    def keep(stage: str, adds_residual: bool = False) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            first, *others = output if isinstance(output, tuple) else (output,)
            # vLLM layers return the output and the residual separately; the next layer adds them.
            total = first.float() + others[0].float() if adds_residual and others else first.float()
            outputs.setdefault(stage, total.cpu().numpy().copy())

        return hook

    model.embed_tokens.register_forward_hook(keep("embedding"))
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(keep(f"layer {number}", adds_residual=True))
    model.norm.register_forward_hook(keep("final norm"))


def _take(worker: Any) -> dict[str, np.ndarray]:
    return worker.layer_outputs
