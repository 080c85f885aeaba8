"""Tasks of the learning runs. The optimum of each task is known, so a run's result is a share of the optimum.

A task writes a run's data. For the control, rewards, answers or preferences are assigned to other samples. The share is
0 or small at the start and 1 at the optimum.
"""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from megarl.data.arithmetic import arithmetic_rows
from tests.distributed.test_offline_data import answers, log_probs, steps, token_ids, turns
from tests.e2e.digits import even_share
from tests.e2e.test_train import REWARD
from tests.tiny_model import tiny_tokenizer, write_tiny_llama

EVEN, ODD, DIGITS = "02468", "13579", "0123456789"

DIVERGENCE = "divergence in nats"
"""Part of learning.json with the divergence from the teacher; other parts are fractions."""

EARNED = "reward"
"""Part of learning.json with the mean reward, for tasks whose share is not the reward."""


class Task(ABC):
    @abstractmethod
    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        """Write the run's data into the folder. Return the overrides that select them."""

    @abstractmethod
    def shares(self, start: Path, run: Path) -> list[float]:
        """Return the share of the optimum in each step, or of the initial and the exported model for offline data."""

    def parts(self, run: Path) -> dict[str, list[float]]:
        """Return further measurements of each step by name."""
        return {}


def sampled_rows(run: Path) -> list[list[dict[str, Any]]]:
    """Return the saved rollouts of each step."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def reward(shuffled: bool) -> str:
    """Return the override that rewards even digits; if `shuffled`, those of another sample."""
    function = "even_share_of_another" if shuffled else "even_share"
    return f"rewards.functions=[{{function: '{REWARD}:{function}', weight: 1.0}}]"


class EvenDigits(Task):
    """Write even digits. The share is their fraction in the responses: 0.1 at the start, 1 at the optimum."""

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        return [reward(shuffled), "run.export=false"]

    def shares(self, start: Path, run: Path) -> list[float]:
        """Return the shares of the saved rollouts."""
        rows = sampled_rows(run)
        sampled = [[row for row in step if not row["sample_id"].endswith("greedy")] for step in rows]
        return [fmean(even_share("", row["response"], None) for row in step) for step in sampled]


class EvenAndLow(EvenDigits):
    """Write digits that are even and below 4, for two rewards. One of them is a hundred times as large as the other, so
    their sum rewards little more than even digits. The share is the fraction of such digits: about 0.05 at the start,
    0.4 if only the larger reward is learned."""

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        names = [f"{name}{'_of_another' if shuffled else ''}" for name in ("even_share", "low_hundredth")]
        functions = ", ".join(f"{{function: '{REWARD}:{name}'}}" for name in names)
        return [f"rewards.functions=[{functions}]", "run.export=false"]

    def shares(self, start: Path, run: Path) -> list[float]:
        return [fmean(low_share(row["response"]) for row in step) for step in sampled_rows(run)]


def low_share(response: str) -> float:
    return sum(character in "02" for character in response) / max(len(response), 1)


class ScoredDigits(EvenDigits):
    """EvenDigits with a reward model that scores each token: 1 for an even digit, else 0.

    For the control, it prefers other tokens.
    """

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        vocabulary = tiny_tokenizer().get_vocab()
        good = [vocabulary[digit] for digit in EVEN]
        if shuffled:
            good = random.Random(0).sample(sorted(set(range(len(vocabulary))).difference(good)), len(good))
        write_token_scorer(folder / "scorer", good)
        model = f"reward_model={{path: {folder / 'scorer'}, tokens_per_microbatch: 1024, threads: 1}}"
        return ["rewards.functions=[]", model, "run.export=false"]


@dataclass(frozen=True)
class TaughtDigits(EvenDigits):
    """EvenDigits without rewards: a teacher, which is larger than the policy, was trained to write random even digits.

    For the control, it was trained to write other tokens.
    """

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        vocabulary = tiny_tokenizer().get_vocab()
        good = [vocabulary[digit] for digit in EVEN]
        if shuffled:
            good = random.Random(0).sample(sorted(set(range(len(vocabulary))).difference(good)), len(good))
        trained_teacher(tuple(good)).save_pretrained(folder / "teacher")
        tiny_tokenizer().save_pretrained(folder / "teacher")
        models = f"[{{name: even, path: {folder / 'teacher'}}}]"
        return [
            "rewards.functions=[]",
            f"teachers={{models: {models}, tokens_per_microbatch: 1024, threads: 1}}",
            "run.export=false",
        ]

    def parts(self, run: Path) -> dict[str, list[float]]:
        """Return the divergence from the teacher in nats."""
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {DIVERGENCE: [line["kl/teacher_even"] for line in lines if "kl/teacher_even" in line]}


class TwoTeachers(EvenDigits):
    """Two teachers, no rewards: each prompt has a teacher, which writes even digits for one prompt and odd digits for
    the other. The share is the fraction of digits of the prompt's teacher.

    In the control, the prompts are swapped.
    """

    digits: ClassVar[dict[str, str]] = {"x": EVEN, "y": ODD}

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        rows = [{"prompt": prompt, "answer": None, "task": prompt} for prompt in self.digits]
        models = []
        for prompt, digits in self.digits.items():
            write_teacher(folder / prompt, [tiny_tokenizer().get_vocab()[digit] for digit in digits])
            taught = next(other for other in self.digits if (other == prompt) is not shuffled)
            models.append(f"{{name: {prompt}, path: {folder / prompt}, sources: [{taught}]}}")
        return [
            "rewards.functions=[]",
            f"data={{source: {write_rows(folder / 'prompts.jsonl', rows)}, source_column: task}}",
            f"teachers={{models: [{', '.join(models)}], tokens_per_microbatch: 1024, threads: 1}}",
            "run.export=false",
        ]

    def shares(self, start: Path, run: Path) -> list[float]:
        return [fmean(map(self.share, step)) for step in sampled_rows(run)]

    def share(self, row: dict[str, Any]) -> float:
        [digits] = [digits for prompt, digits in self.digits.items() if prompt in row["prompt"]]
        return sum(character in digits for character in row["response"]) / max(len(row["response"]), 1)


HINT = "!" * 32


class HintedDigits(EvenDigits):
    """EvenDigits with a reward of 0 unless all digits are even. The teacher is the policy itself, which writes even
    digits if it sees a hint.

    The control has no teacher, so it is GRPO with a reward that is 0 at first.
    """

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        vocabulary = tiny_tokenizer().get_vocab()
        model = write_hinted(folder / "model", [vocabulary[digit] for digit in EVEN], vocabulary["!"])
        rows = [{"prompt": prompt, "answer": None, "hint": f"{prompt}{HINT}"} for prompt in "abcdefgh"]
        return [
            f"model.path={model}",
            f"rewards.functions=[{{function: '{REWARD}:all_even'}}]",
            f"data.source={write_rows(folder / 'prompts.jsonl', rows)}",
            f"teachers.models={'[]' if shuffled else '[{name: hinted, prompt_column: hint}]'}",
            "run.export=false",
        ]

    def parts(self, run: Path) -> dict[str, list[float]]:
        """Return the mean reward."""
        return {EARNED: [fmean(row["reward"] for row in step) for step in sampled_rows(run)]}


def write_hinted(folder: Path, good: Sequence[int], hint: int, margin: float = 8.0) -> Path:
    """Write a language model that samples a token in `good` if half of the text consists of the token `hint`, and a
    uniformly random token if the text does not contain it.

    Its embeddings are one-hot. Its attention averages over the text and adds the share of the hint's token to dimension
    0, which is the padding's embedding. The output layer turns this dimension into logits of the tokens in `good`:
    `margin` if the share is one half.
    """
    size, factor = len(tiny_tokenizer().get_vocab()), 4.0
    write_tiny_llama(folder, vocab_size=size, hidden_size=size, num_layers=1, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        _pass_embeddings_on(model.model, size)
        layer, unit = model.model.layers[0], torch.eye(size)
        layer.input_layernorm.weight.fill_(1.0)
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.zero_()
        attention.v_proj.weight[0, hint] = factor / layer.input_layernorm(unit).max()
        attention.o_proj.weight[0, 0] = 1.0
        model.lm_head.weight.zero_()
        with_hint = model.model.norm(unit[1] + factor / 2 * unit[0])[0]
        model.lm_head.weight[list(good), 0] = margin / with_hint
    model.save_pretrained(folder)
    return folder


@cache
def trained_teacher(good: tuple[int, ...], updates: int = 60, batch: int = 16) -> PreTrainedModel:
    """Return a language model that was trained to answer sums with eight random tokens in `good`.

    Each update has new random answers, so the optimum is the uniform distribution over `good` for every token.
    """
    with TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            write_tiny_llama(Path(folder), hidden_size=128, tied=False, seed=1)
        )
    texts = (f"<|user|>{row.prompt}<eos><|assistant|>" for row in arithmetic_rows(seed=1, size=256))
    prompts = torch.cat([token_ids([(text, False)])[0] for text in texts])
    choices, generator = torch.tensor(good), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    for _ in range(updates):
        asked = prompts[torch.randint(len(prompts), (batch,), generator=generator)]
        said = choices[torch.randint(len(choices), (batch, 8), generator=generator)]
        labels = torch.cat((torch.full_like(asked, -100), said), 1)
        model(torch.cat((asked, said), 1), labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def write_teacher(folder: Path, good: Sequence[int], margin: float = 8.0) -> None:
    """Write a language model that continues every text with one of these tokens: their logits exceed all others by the
    margin, so that it writes other tokens with a probability below 1 %.

    Its embeddings are one-hot, and its layers add nothing to them.
    """
    size = len(tiny_tokenizer().get_vocab())
    write_tiny_llama(folder, vocab_size=size, hidden_size=size, num_layers=1, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        _pass_embeddings_on(model.model, size)
        model.lm_head.weight.zero_()
        model.lm_head.weight[list(good)] = margin / model.model.norm(torch.eye(size)).max()
    model.save_pretrained(folder)


def _pass_embeddings_on(trunk: torch.nn.Module, size: int) -> None:
    """Make the embeddings one-hot, and let the layers and the norm add nothing to them but a common factor."""
    for layer in trunk.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    trunk.embed_tokens.weight.copy_(torch.eye(size))
    trunk.norm.weight.fill_(1.0)


def write_token_scorer(folder: Path, good: Sequence[int]) -> None:
    """Write a classifier that scores these tokens with 1 and all others with 0, regardless of context.

    Its embeddings are one-hot, and its layers add nothing to them.
    """
    size = len(tiny_tokenizer().get_vocab())
    trunk = write_tiny_llama(folder, vocab_size=size, hidden_size=size, num_layers=1)
    model = AutoModelForTokenClassification.from_pretrained(trunk, num_labels=1)
    with torch.no_grad():
        _pass_embeddings_on(model.model, size)
        model.score.bias.zero_()
        model.score.weight.zero_()
        scale = model.model.norm(torch.eye(size)).max()
        model.score.weight[0, list(good)] = 1 / scale
    model.save_pretrained(folder)


Optimum = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(reference log-probs [P, V], token rewards [V], KL coefficient) -> log-probs of the optimal policy [P, V]."""


def of_reverse_kl(reference: torch.Tensor, rewards: torch.Tensor, beta: float) -> torch.Tensor:
    """Return log π* of argmax E_π[r] − β·KL(π ‖ ρ) = ρ·exp(r / β) / Z."""
    return (reference + rewards / beta).log_softmax(-1)


def of_forward_kl(reference: torch.Tensor, rewards: torch.Tensor, beta: float) -> torch.Tensor:
    """Return log π* of argmax E_π[r] − β·KL(ρ ‖ π).

    At the optimum, r + β·ρ/π is the same λ for all tokens. So π = β·ρ / (λ − r), which sums to 1 for exactly one λ in
    (max r, max r + β], found by bisection.
    """
    low = torch.full((len(reference), 1), rewards.max().item(), dtype=reference.dtype)
    high = low + beta
    for _ in range(60):
        middle = (low + high) / 2
        above = (beta * reference.exp() / (middle - rewards)).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (beta * reference.exp() / (high - rewards)).log()


@dataclass(frozen=True)
class Bandit(Task):
    """Answer four prompts with one token, rewarded with 1 for an even digit, under a KL to the initial policy ρ.

    The share is 1 − KL(π ‖ π*) / KL(ρ ‖ π*) for the optimum π*.
    """

    optimum: Optimum
    beta: float = 0.3
    prompts: str = "abcd"

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        rows = write_rows(folder / "prompts.jsonl", [{"prompt": prompt, "answer": None} for prompt in self.prompts])
        return [reward(shuffled), f"data.source={rows}", f"algorithm.kl.coefficient={self.beta}"]

    def shares(self, start: Path, run: Path) -> list[float]:
        policies = [self.policy(folder) for folder in (start, run / "model")]
        rewards = torch.tensor([even_share("", tiny_tokenizer().decode([i]), None) for i in range(len(policies[0][0]))])
        best = self.optimum(policies[0], rewards.double(), self.beta)
        at_start, at_end = ((policy.exp() * (policy - best)).sum(-1).mean().item() for policy in policies)
        return [0.0, 1 - at_end / at_start]

    def policy(self, folder: Path) -> torch.Tensor:
        """Return the log-probs of the token after each prompt, float64 [P, V]."""
        model = AutoModelForCausalLM.from_pretrained(folder)
        asked = [token_ids([(f"<|user|>{prompt}<eos><|assistant|>", False)])[0] for prompt in self.prompts]
        with torch.no_grad():
            return torch.stack([model(ids).logits[0, -1].double().log_softmax(-1) for ids in asked])


class Answers(Task):
    """Supervised fine-tuning: answer a digit with the next one. The share is the probability of the answer, including
    its end token. For the control, answers belong to other rows.
    """

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        asked = [digit for digit in DIGITS for _ in range(4)]
        said = [self.next(digit) for digit in asked]
        if shuffled:
            random.Random(0).shuffle(said)
        rows = [{"messages": self.messages(*pair)} for pair in zip(asked, said, strict=True)]
        return [f"data={{format: messages, source: {write_rows(folder / 'conversations.jsonl', rows)}}}"]

    def shares(self, start: Path, run: Path) -> list[float]:
        return [self.probability(folder) for folder in (start, run / "model")]

    def probability(self, folder: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder)
        texts = [turns(self.messages(digit, self.next(digit))) for digit in DIGITS]
        with torch.no_grad():
            return fmean(log_probs(model, text).sum().exp().item() for text in texts)

    @staticmethod
    def next(digit: str) -> str:
        return DIGITS[(int(digit) + 1) % 10]

    @staticmethod
    def messages(asked: str, said: str) -> list[dict]:
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


PREFERRED = {"a": 0.9, "b": 0.7, "c": 0.3, "d": 0.1}
"""Share of each prompt's ten pairs in which the first of RESPONSES is preferred."""

RESPONSES = ("x", "y")


@dataclass(frozen=True)
class Preferences(Task):
    """Learn preferences between two responses to each of four prompts.

    The first response is preferred in a known share p of the pairs. The model's margin has the optimum `best(p)`: a
    difference of scores (`classifies`), of log-ratios to the initial model (`is_relative`), or of log-probs. The share
    is 1 − distance to the optimum / the optimum's norm, over the prompts. For the control, preferences belong to other
    pairs.
    """

    best: Callable[[float], float]
    classifies: bool = False
    is_relative: bool = True

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        asked = [(prompt, i < round(10 * share)) for prompt, share in PREFERRED.items() for i in range(10)]
        first_wins = [wins for _, wins in asked]
        if shuffled:
            random.Random(0).shuffle(first_wins)
        rows = [
            dict(zip(("prompt", "chosen", "rejected"), (prompt, *RESPONSES[:: 1 if wins else -1]), strict=True))
            for (prompt, _), wins in zip(asked, first_wins, strict=True)
        ]
        return [f"data={{format: preferences, source: {write_rows(folder / 'preferences.jsonl', rows)}}}"]

    def shares(self, start: Path, run: Path) -> list[float]:
        best = torch.tensor([self.best(share) for share in PREFERRED.values()])
        margins = self.margins(run / "model")
        if self.is_relative and not self.classifies:
            margins = margins - self.margins(start)
        return [0.0, 1 - ((margins - best).norm() / best.norm()).item()]

    def margins(self, folder: Path) -> torch.Tensor:
        """Return the model's margin of the first response over the second for each prompt."""
        kind = AutoModelForSequenceClassification if self.classifies else AutoModelForCausalLM
        model = kind.from_pretrained(folder)
        first, second = RESPONSES
        pairs = [answers({"prompt": prompt, "chosen": first, "rejected": second}) for prompt in PREFERRED]
        with torch.no_grad():
            return torch.tensor([self.value(model, one) - self.value(model, other) for one, other in pairs])

    def value(self, model: torch.nn.Module, text: Sequence[tuple[str, bool]]) -> float:
        return (model(token_ids(text)[0]).logits[0, 0] if self.classifies else log_probs(model, text).sum()).item()


@dataclass(frozen=True)
class Labels(Task):
    """Learn labels of the two steps that follow each of four prompts.

    The first step is right in a known share p of the rows, the second in the others. The optimal score is
    log(p / (1 − p)) at the first step and its negative at the second. The share is 1 − distance to the optimum / the
    optimum's norm, over all labeled tokens. For the control, labels belong to other rows.

    Attributes:
        everywhere: label every token of a step instead of only its last one.
    """

    everywhere: bool = False

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        asked = [(prompt, i < round(10 * share)) for prompt, share in PREFERRED.items() for i in range(10)]
        right = [is_right for _, is_right in asked]
        if shuffled:
            random.Random(0).shuffle(right)
        rows = [
            {"prompt": prompt, "steps": RESPONSES, "labels": [first, not first]}
            for (prompt, _), first in zip(asked, right, strict=True)
        ]
        return [f"data={{format: labels, source: {write_rows(folder / 'labels.jsonl', rows)}}}"]

    def shares(self, start: Path, run: Path) -> list[float]:
        model = AutoModelForTokenClassification.from_pretrained(run / "model")
        found, best = [], []
        for prompt, share in PREFERRED.items():
            row = {"prompt": prompt, "steps": RESPONSES, "labels": [share, 1 - share]}
            [text] = steps(row, self.everywhere)
            ids, labels = token_ids(text)
            with torch.no_grad():
                found.append(model(ids).logits[0, ~labels.isnan(), 0])
            best.append(labels[~labels.isnan()].logit())
        difference, optimum = torch.cat(found) - torch.cat(best), torch.cat(best)
        return [0.0, 1 - (difference.norm() / optimum.norm()).item()]


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
