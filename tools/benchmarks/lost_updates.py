"""Measure how much learning is lost by rounding parameters, and how it can be recovered: learning curves at equal
learning rates.

.venv/bin/python tools/benchmarks/lost_updates.py --out tools/benchmarks/results/lost_updates.json
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this file is run as a script and imported by tests


from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.prompt import Prompt
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.model.build import named_parameters
from megarl.megatron.optimizer import parts_of
from megarl.megatron.workers.actor import ActorWorker
from tests.tiny_model import tiny_tokenizer
from tools.benchmarks.benchmark import load_config, local_batches, run_benchmark, sample_of

RATES = (1e-5, 1e-6)
SEEDS, UPDATES, FIRST_UPDATES = 5, 50, 250
"""Number of models and languages, of updates per curve, and of updates that train the initial model."""
HIDDEN, LAYERS = 256, 3
TOKENS, FIRST = 64, 8
"""Number of tokens of the language, and the first id, after the tokenizer's special tokens."""
KEYS, LENGTH, SAMPLES = 4, 32, 16
"""Number of transition tables, of tokens per sample, and of samples per update."""
LIKELY = (0.6, 0.25, 0.1, 0.05)
NEW = (LIKELY[1], LIKELY[0], *LIKELY[2:])
"""Probabilities of a token's successors in the initial model's language, and in the language that updates teach."""
STD = 0.16
"""Standard deviation of the initial weights. Their median magnitude is then 0.11, as in SmolLM2, so that bfloat16
rounding errors have the same size."""
TAIL = 10
"""Number of updates at the end of a curve over which the improvement is averaged."""


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


def measure(_: object) -> dict[str, Any]:
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
            metrics = worker.update(local_batch(worker, ids))
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


def local_batch(worker: ActorWorker, batch: list[list[int]]) -> LocalBatch:
    samples = [sample_of(f"{i}", Prompt(f"{i}", "", ids[:1]), ids[1:]) for i, ids in enumerate(batch)]
    [local] = local_batches(samples, [1.0] * len(samples), worker.packing)
    return local


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
    run_benchmark(__doc__, measure)
