"""SFT and DPO on rows with images, from files to updated weights.

The reference is transformers and torch, one sample at a time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.core.metrics import merge
from megarl.models.folder import read_config
from megarl.models.vision import add_vision
from tests import tiny_vision
from tests.closeness import assert_close, close_to, expected, load
from tests.distributed.test_offline_data import ROWS, is_pairwise, train
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import EPS, LR, config_of, whole_tensors

SIZES = [(56, 40), (30, 70), (64, 64), (64, 32)]
"""Width and height of each image, in pixels."""

IMAGES = [[[0], [1, 2]], [[], [3]], [[2]], [[1], []], [[]], [[0, 0], [3]]]
"""The images of each user turn of each row. Images are repeated, and row 4 has none."""

BETA = 0.5

Turn = tuple[str, str, Sequence[int]]
"""Role, text, and the images before the text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that also contains the images."""
    folder = tiny_vision.build(tmp_path_factory.mktemp("model"), "qwen3_vl")
    pixels = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def sentence(source: random.Random) -> str:
    return "".join(source.choice("abcdefgh 0123") for _ in range(source.randrange(1, 9)))


def conversations() -> list[list[Turn]]:
    source = random.Random(1)
    return [
        [turn for images in row for turn in (("user", sentence(source), images), ("assistant", sentence(source), ()))]
        for row in IMAGES
    ]


def pairs() -> list[tuple[Turn, str, str]]:
    """Return the prompt, the chosen and the rejected response of each row."""
    source = random.Random(2)
    return [(("user", sentence(source), row[0]), sentence(source), sentence(source)) for row in IMAGES]


def marked(turn: Turn) -> str:
    return "<image>" * len(turn[2]) + turn[1]


def names(turns: Sequence[Turn]) -> list[str]:
    return [f"{i}.png" for _, _, images in turns for i in images]


class Reference:
    """The model in transformers, its copy before training, and its processor."""

    def __init__(self, folder: Path):
        self.model, self.start = (load(AutoModelForImageTextToText, folder) for _ in range(2))
        self._folder, self._tokenizer = folder, tiny_vision.tokenizer()
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def outputs(self, model: torch.nn.Module, turns: Sequence[Turn]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return transformers' loss with the assistant's tokens as labels, and the sum of their log-probs."""
        ids: list[int] = []
        said: list[bool] = []
        inputs = {}
        files = [Image.open(self._folder / name) for name in names(turns)]
        if files:
            inputs = dict(self._processor(files, return_tensors="pt"))
            inputs["pixel_values"] = inputs["pixel_values"].to(torch.get_default_dtype())
        counts = iter([int(grid.prod()) // 4 for grid in inputs.get("image_grid_thw", ())])
        for role, content, images in turns:
            pictures = "".join(f"<|vision_start|>{'<|image_pad|>' * next(counts)}<|vision_end|>" for _ in images)
            for part, flag in (
                (f"<|im_start|>{role}\n{pictures}", False),
                (f"{content}<|im_end|>", role == "assistant"),
                ("\n", False),
            ):
                found = self._tokenizer(part)["input_ids"]
                ids, said = ids + found, said + [flag] * len(found)
        tokens, flags = torch.tensor([ids[:-1]]), torch.tensor(said[:-1])
        labels = torch.where(flags, tokens, -100)
        types = (tokens == tiny_vision.IMAGE_ID).int()
        output = model(tokens, mm_token_type_ids=types, labels=labels, **inputs)
        log_probs = output.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return output.loss, log_probs[flags[1:]].sum()

    def sft(self, rows: Sequence[Sequence[Turn]]) -> torch.Tensor:
        """Return the loss averaged over all trained tokens, from transformers' mean for each row."""
        counts = [sum(len(text) + 1 for role, text, _ in row if role == "assistant") for row in rows]
        losses = [self.outputs(self.model, row)[0] * count for row, count in zip(rows, counts, strict=True)]
        return sum(losses[1:], losses[0]) / sum(counts)

    def dpo(self, rows: Sequence[tuple[Turn, str, str]]) -> torch.Tensor:
        """Return -log σ(β((log π/π₀)(chosen) − (log π/π₀)(rejected))), averaged over pairs."""
        ratios = []
        for prompt, *responses in rows:
            for response in responses:
                turns = [prompt, ("assistant", response, ())]
                ratios.append(self.outputs(self.model, turns)[1] - self.outputs(self.start, turns)[1].detach())
        return is_pairwise(BETA * torch.stack(ratios), 0.0)

    def run(self, name: str, rows: Sequence) -> tuple[dict[str, torch.Tensor], float]:
        """Train on each half of the rows. Return the weights and the last loss."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
        for number in (0, 1):
            loss = {"sft": self.sft, "dpo": self.dpo}[name](rows[number * ROWS // 2 :][: ROWS // 2])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
        return tiny_vision.canonical(dict(self.model.named_parameters())), loss.item()


CASES = {f"{name}: {layout}": layout for name in ("sft", "dpo") for layout in ("", "cp: 2", "pp: 2", "dp: 2")}


@pytest.mark.parametrize("name", exhaustive_but(CASES, "sft: cp: 2", "dpo: "))
def test_two_updates_with_images_equal_transformers(folder: Path, name: str) -> None:
    objective, layout = name.split(": ", 1)
    if objective == "sft":
        rows, kind, key, longest = conversations(), "messages", "policy/nll", 128
        records = [
            {"messages": [{"role": t[0], "content": marked(t)} for t in row], "images": names(row)} for row in rows
        ]
        keys = "name: sft, aggregation: token_mean"
    else:
        rows, kind, key, longest = pairs(), "preferences", "preference/loss", 64
        records = [
            {"prompt": marked(prompt), "chosen": chosen, "rejected": rejected, "images": names([prompt])}
            for prompt, chosen, rejected in rows
        ]
        keys = f"name: dpo, beta: {BETA}"
    source = folder / f"{kind}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = config_of(
        folder,
        "model.vision=true",
        "rollout.temperature=1.0",
        f"rollout.context_length={longest}",
        f"data={{source: {source}, format: {kind}, image_column: images}}",
        f"algorithm.objective={{{keys}}}",
        f"actor.layout={{{layout}}}",
        "actor.tokens_per_microbatch=128",
    )
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder)
    weights, loss = zip(*expected(lambda: Reference(folder).run(objective, rows)), strict=True)
    reported = [rank.metrics for rank in ranks if rank.metrics]
    assert sum(metrics["policy/loss"].value for metrics in reported) == close_to(*loss)
    assert merge(reported)[key].value == close_to(*loss)
    assert_close(whole_tensors(add_vision(read_config(folder)), ranks, "weights"), *weights, "weight")
