"""SFT, three kinds of reward models and DPO, from files to updated weights.

The reference is plain transformers and torch, one sample at a time, from the text of the chat template.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.specs import ObjectiveSpec
from megarl.cluster.groups.ranks import worker_class
from megarl.config.schema import Config
from megarl.core.metrics import merge
from megarl.core.sample import Sample, SampleRef
from megarl.data.offline import load_offline_data
from megarl.megatron.workers.actor import ActorWorker
from megarl.step.dispatch import dispatch
from tests.closeness import assert_close, close_to, expected, load
from tests.forked import run_ranks
from tests.parity import EPS, LR, RankResult, config_of, local_batch, whole_tensors
from tests.tiny_model import CHARACTERS, EOS_ID, SHARDED_VOCAB, SPECIAL_TOKENS, tiny_tokenizer, write_tiny_llama

LAYOUTS = {
    "1 process": "{}",
    "TP2, sequence parallel": "{tp: 2, sequence_parallel: true}",
    "PP2": "{pp: 2}",
    "CP2": "{cp: 2}",
    "DP2": "{dp: 2}",
}
ROWS = 6
"""Number of rows in a data file. Each of two updates trains on half of them."""

Text = Sequence[tuple[str, bool]] | Sequence[tuple[str, float]]
"""The text of a sample in parts. Each part has a flag (whether it is trained on) or a label (NaN: no label)."""

NONE = float("nan")

WORDS = [f"<{i}>" for i in range(SHARDED_VOCAB - len(CHARACTERS) - len(SPECIAL_TOKENS))]
"""The tokens after the characters. With TP2, the second rank has the last 44 words."""
TOKENIZER = tiny_tokenizer(SHARDED_VOCAB, WORDS)
PIECES = [*"abcdefgh 0123", *WORDS[-13:]]
"""The tokens of random sentences, on both ranks of TP2."""

CLASSES = {
    None: AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
"""The name of a language model and of each kind of classifier in transformers."""


@dataclass(frozen=True)
class Case:
    """An objective with its reference. `loss` maps the samples or pairs of an update to a loss. `texts` maps a row to
    its samples."""

    objective: str
    loss: Callable[[torch.nn.Module, torch.nn.Module, list[Text]], torch.Tensor]
    name: str = "policy"
    texts: Callable[[dict], list[Text]] = lambda row: answers(row)

    @property
    def spec(self) -> ObjectiveSpec:
        return OBJECTIVES[re.match(r"name: (\w+)", self.objective).group(1)]


def sentence(source: random.Random, longest: int) -> str:
    return "".join(source.choice(PIECES) for _ in range(source.randrange(1, longest)))


def conversations(seed: int) -> list[dict]:
    """Return conversations with one to three assistant turns. Some have a system prompt, and some end with a user
    turn."""
    source = random.Random(seed)
    rows = []
    for number in range(ROWS):
        messages = [{"role": "system", "content": sentence(source, 6)}] if number % 2 else []
        for _ in range(1 + number % 3):
            messages += [{"role": role, "content": sentence(source, 8)} for role in ("user", "assistant")]
        rows.append({"messages": [*messages, *([{"role": "user", "content": "ok"}] if number == 4 else [])]})
    return rows


def preferences(seed: int) -> list[dict]:
    source = random.Random(seed)
    return [{name: sentence(source, 12) for name in ("prompt", "chosen", "rejected")} for _ in range(ROWS)]


def labelled(seed: int) -> list[dict]:
    """Return responses of one to three steps with soft and hard labels. Some steps have no label."""
    source, rows = random.Random(seed), []
    for number in range(ROWS):
        steps = [sentence(source, 8) for _ in range(1 + number % 3)]
        labels = [(0.25, True, False, 1)[(number + i) % 4] for i in range(len(steps))]
        rows.append({"prompt": sentence(source, 12), "steps": steps, "labels": labels})
    rows[2]["labels"][1] = None
    return rows


def turns(messages: list[dict]) -> Text:
    """Return the messages in the tiny model's chat template: <|role|>content<eos>."""
    parts = []
    for message in messages:
        said = message["role"] == "assistant"
        parts += [(f"<|{message['role']}|>", False), (f"{message['content']}<eos>", said)]
    return parts


def answers(row: dict) -> list[Text]:
    prompt = (f"<|user|>{row['prompt']}<eos><|assistant|>", False)
    return [[prompt, (f"{row[name]}<eos>", True)] for name in ("chosen", "rejected")]


def steps(row: dict, everywhere: bool) -> list[Text]:
    """Return the response with each step's label, either on all text of the step (`everywhere`) or where it ends: at a
    line break or the end of the sequence."""
    parts = [(f"<|user|>{row['prompt']}<eos><|assistant|>", NONE)]
    for number, (step, label) in enumerate(zip(row["steps"], row["labels"], strict=True), start=1):
        value = NONE if label is None else float(label)
        end = "<eos>" if number == len(row["steps"]) else "\n"
        parts += [(step, value if everywhere else NONE), (end, value)]
    return [parts]


def token_ids(text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids, int64 [1, T], and their flags or labels, bool or float [T]."""
    parts = [(TOKENIZER.encode(part), said) for part, said in text]
    ids = [token for part, _ in parts for token in part]
    return torch.tensor([ids]), torch.tensor([said for part, said in parts for _ in part])


def log_probs(model: torch.nn.Module, text: Text) -> torch.Tensor:
    """Return the log-probs of the trained tokens."""
    ids, said = token_ids(text)
    of_each = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return of_each[said[1:]]


def sft(model: torch.nn.Module, start: torch.nn.Module, samples: list[Text]) -> torch.Tensor:
    return -torch.cat([log_probs(model, text) for text in samples]).mean()


def bradley_terry(smoothing: float = 0.0):
    def loss(model: torch.nn.Module, start: torch.nn.Module, samples: list[Text]) -> torch.Tensor:
        """Return the pairwise loss. A sample's score is that of its last token."""
        scores = torch.cat([model(token_ids(text)[0]).logits[:, 0] for text in samples])
        return is_pairwise(scores, smoothing)

    return loss


def is_pairwise(rewards: torch.Tensor, smoothing: float) -> torch.Tensor:
    wins = torch.sigmoid(rewards[0::2] - rewards[1::2])
    return -((1 - smoothing) * wins.log() + smoothing * (1 - wins).log()).mean()


def log_ratios(model, start, samples: list[Text], normalized: bool) -> torch.Tensor:
    ratios = [log_probs(model, text) - log_probs(start, text).detach() for text in samples]
    return torch.stack([ratio.mean() if normalized else ratio.sum() for ratio in ratios])


def dpo(beta: float, smoothing: float = 0.0, normalized: bool = False):
    return lambda model, start, samples: is_pairwise(beta * log_ratios(model, start, samples, normalized), smoothing)


def ipo(beta: float, normalized: bool = False):
    def loss(model: torch.nn.Module, start: torch.nn.Module, samples: list[Text]) -> torch.Tensor:
        ratios = log_ratios(model, start, samples, normalized)
        return ((ratios[0::2] - ratios[1::2] - 1 / (2 * beta)) ** 2).mean()

    return loss


def label_loss(model: torch.nn.Module, start: torch.nn.Module, samples: list[Text]) -> torch.Tensor:
    """Return the mean cross-entropy over all labeled tokens."""
    scores, known = [], []
    for text in samples:
        ids, labels = token_ids(text)
        scores.append(model(ids).logits[0, ~labels.isnan(), 0])
        known.append(labels[~labels.isnan()])
    return binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(known))


def slic(delta: float, coefficient: float, normalized: bool = False):
    def loss(model: torch.nn.Module, start: torch.nn.Module, samples: list[Text]) -> torch.Tensor:
        said = [log_probs(model, text) for text in samples]
        scores = torch.stack([each.mean() if normalized else each.sum() for each in said])
        pairs = list(zip(scores[0::2], scores[1::2], strict=True))
        hinge = [torch.clamp(delta - (better - worse), min=0) for better, worse in pairs]
        return torch.stack(hinge).mean() - coefficient * torch.stack([better for better, _ in pairs]).mean()

    return loss


CASES = {
    "SFT": Case("name: sft, aggregation: token_mean", sft, texts=lambda row: [turns(row["messages"])]),
    "reward model": Case("name: reward_model", bradley_terry(), "reward_model"),
    "reward model, smoothed": Case("name: reward_model, label_smoothing: 0.2", bradley_terry(0.2), "reward_model"),
    "process reward model": Case(
        "name: process_reward_model, aggregation: token_mean",
        label_loss,
        "reward_model",
        lambda row: steps(row, everywhere=False),
    ),
    "token reward model": Case(
        "name: token_reward_model, aggregation: token_mean",
        label_loss,
        "reward_model",
        lambda row: steps(row, everywhere=True),
    ),
    "DPO": Case("name: dpo, beta: 0.5", dpo(0.5)),
    "DPO, smoothed and by length": Case(
        "name: dpo, beta: 2.0, label_smoothing: 0.1, length_normalised: true", dpo(2.0, 0.1, True)
    ),
    "IPO": Case("name: ipo, beta: 0.2", ipo(0.2)),
    "IPO by length": Case("name: ipo, beta: 0.2, length_normalised: true", ipo(0.2, True)),
    "SLiC": Case("name: slic, hinge_margin: 8.0, regularisation: 0.3", slic(8.0, 0.3)),
    "SLiC by length": Case(
        "name: slic, hinge_margin: 0.05, regularisation: 0.0, length_normalised: true", slic(0.05, 0.0, True)
    ),
}
EVERYWHERE = ("SFT", "reward model", "process reward model", "DPO, smoothed and by length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2, vocab_size=SHARDED_VOCAB)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(folder, tmp_path_factory) -> dict[str | None, Path]:
    """The language model, and classifiers with a random head, so that the first update reaches the backbone."""
    paths = {None: folder}
    for kind in ("sequence", "token"):
        model = CLASSES[kind].from_pretrained(folder, num_labels=1)
        torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(5))
        paths[kind] = tmp_path_factory.mktemp("classifier")
        model.save_pretrained(paths[kind])
        TOKENIZER.save_pretrained(paths[kind])
    return paths


def train(store, rank: int, config: Config, folder: Path) -> RankResult:
    """Run two updates, each on half of the file's rows, in order."""
    worker = worker_class(config, "actor")(config, folder, rank, store, threads=1)
    data = load_offline_data(config, folder)
    for number in (0, 1):
        chosen = [sample for row in data.rows[number * ROWS // 2 :][: ROWS // 2] for sample in row]
        if data.images is not None:
            chosen = list(map(data.images.attach, chosen))
        handed_out = dispatch(config, [scored_sample(sample) for sample in chosen], worker.packing)
        batch = local_batch(handed_out[worker.data_parallel_rank])
        if isinstance(worker, ActorWorker) and config.has_reference:
            worker.keep_log_probs("reference", batch)
        metrics = worker.update(batch)
        worker.end_step()
    return RankResult(worker.holder, {}, {n: p.clone() for n, p in worker.parameters().items()}, metrics)


def scored_sample(sample: Sample) -> SampleRef:
    return SampleRef.of(sample, sample)


def plain(case: Case, folder: Path, rows: list[dict]) -> tuple[dict[str, torch.Tensor], float]:
    """Train in transformers. Return the weights and the last loss."""
    model, start = (load(CLASSES[case.spec.classifier], folder) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    texts = [case.texts(row) for row in rows]
    for number in (0, 1):
        samples = [text for row in texts[number * ROWS // 2 :][: ROWS // 2] for text in row]
        loss = case.loss(model, start, samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(model.named_parameters()), loss.item()


def is_in_test(name: str, layout: str) -> bool:
    """Return whether `make test` runs the case: every case with CP2, and one case with every layout."""
    return layout == "CP2" or name == "DPO, smoothed and by length"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if is_in_test(name, layout) else pytest.mark.exhaustive)
        for name in CASES
        for layout in LAYOUTS
        if name in EVERYWHERE or layout in ("1 process", "CP2")
    ],
)
def test_two_updates_equal_plain_torch(models, tmp_path, name, layout):
    case, source = CASES[name], tmp_path / "rows.jsonl"
    kind = case.spec.rows[0]
    rows = {"messages": conversations, "preferences": preferences, "labels": labelled}[kind](1)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = models[case.spec.classifier]
    config = config_of(
        model,
        "rollout.temperature=1.0",
        f"data={{source: {source}, format: {kind}}}",
        f"algorithm.objective={{{case.objective}}}",
        f"actor.layout={LAYOUTS[layout]}",
        "actor.tokens_per_microbatch=128",
    )
    ranks = run_ranks(config.actor.layout.world_size, train, config, model)
    weights, loss = zip(*expected(lambda: plain(case, model, rows)), strict=True)
    reported = [rank.metrics for rank in ranks if rank.metrics]
    assert sum(metrics[f"{case.name}/loss"].value for metrics in reported) == close_to(*loss)
    per_unit = {"messages": "policy/nll", "preferences": "preference/loss", "labels": "label/loss"}[kind]
    assert merge(reported)[per_unit].value == close_to(*loss)
    hf_config = json.loads((model / "config.json").read_text())
    assert_close(whole_tensors(hf_config, ranks, "weights"), *weights, "weight")


def test_end_of_sequence_is_trained():
    assert token_ids([("a<eos>", True)])[0][0, -1] == EOS_ID
