"""What each layer of an engine's model gives for one sequence. The process has `environment` set before it imports
this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input

from megarl.config.schema import Config
from megarl.rollout.vllm.engine import rollout_arguments


def layer_outputs(config: Config, folder: Path, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns by stage, in the order of computing, what comes out of it for all tokens but the last, float32 [T − 1,
    hidden], and as the last stage the log-probs of the tokens after the first, but for the last, float32 [T − 2].

    config   of an engine of one rank that loads the weights of its folder
    """
    arguments = rollout_arguments(
        config.rollout, folder, config.model.dtype, config.run.seed, head_dtype=config.model.head_dtype
    )
    engine = LLM(**arguments | {"enforce_eager": True})  # compiled layers call no hooks
    engine.collective_rpc(_watch)
    read = list(token_ids[:-1])
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = engine.generate([tokens_input(read)], asked, use_tqdm=False)
    [found] = engine.collective_rpc(_take)
    log_probs = [output.prompt_logprobs[i][token].logprob for i, token in enumerate(read) if i]
    return {stage: values[: len(read)] for stage, values in found.items()} | {"log-probs": np.float32(log_probs)}


def _watch(worker: Any) -> None:
    """Notes from now on what layers give when they are first called."""
    model, found = worker.model_runner.get_model().model, {}
    worker.layer_outputs = found

    def keep(stage: str, adds_residual: bool = False) -> Callable[..., None]:
        def hook(module, given, output) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            # Between layers vLLM hands on what a layer adds and what it adds it to, one beside the other.
            total = parts[0].float() + parts[1].float() if adds_residual and len(parts) > 1 else parts[0].float()
            found.setdefault(stage, total.cpu().numpy().copy())

        return hook

    model.embed_tokens.register_forward_hook(keep("embedding"))
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(keep(f"layer {number}", adds_residual=True))
    model.norm.register_forward_hook(keep("final norm"))


def _take(worker: Any) -> dict[str, np.ndarray]:
    return worker.layer_outputs
