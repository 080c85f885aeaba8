"""Questions about scenes as a task, and a tiny vision-language model that at first answers mostly at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_vision
from tests.e2e.learning_tasks import Task, sampled_rows
from tests.scenes import COLORS, SHAPES, WHICH_DIGIT, Scene, choices, scene, write_scenes

WORDS = ("user\n", "assistant\n", WHICH_DIGIT, "How many ", "What is ", *SHAPES, *COLORS)
"""Single tokens, which keep prompts and answers short."""

HIDDEN, BATCH = 128, 32
UPDATES, LEARNING_RATE = 240, 2e-3
"""Training of all weights on correct answers."""

HEAD_UPDATES, HEAD_LEARNING_RATE, GUESSED = 60, 1e-2, 0.9
"""Training of only the output layer on answers of which the fraction GUESSED is random. The model still recognizes
scenes, but answers mostly at random."""


def write_reader(folder: Path) -> Path:
    """Write a Qwen3-VL with 1.5 million parameters, fine-tuned on conversations about scenes. Return the folder."""
    torch.set_num_threads(1)  # the matrices are small, and other processes need the cores
    heads = dict(num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 32, head_dim=32)
    text = dict(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, **heads)
    tower = dict(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_heads=HIDDEN // 32, depth=2)
    tower |= dict(deepstack_visual_indexes=[0])
    tiny_vision.build(folder, "qwen3_vl", tower=tower, **text)
    tokenizer = tiny_vision.tokenizer()
    tokenizer.add_tokens(list(WORDS))
    tokenizer.save_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    initialize(model)
    imitate(model, tokenizer, Qwen2VLImageProcessorPil.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


def initialize(model: torch.nn.Module) -> None:
    """Scale weights such that a layer's outputs are about as large as its inputs: with the larger weights of
    tests/tiny_vision.py, training is slow."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_table = "embed_tokens" in name or "pos_embed" in name
            torch.nn.init.normal_(parameter, std=0.35 if is_table else 0.7 * parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)


def imitate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, processor: Qwen2VLImageProcessorPil) -> None:
    """Train the model to answer all questions about random scenes, then to guess most answers."""
    random = Random(0)
    for updates, rate, guessed in ((UPDATES, LEARNING_RATE, 0.0), (HEAD_UPDATES, HEAD_LEARNING_RATE, GUESSED)):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates, pct_start=0.1)
        for _ in range(updates):
            inputs = batch(tokenizer, processor, [scene(random) for _ in range(BATCH)], random, guessed)
            model(**inputs).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)


def batch(
    tokenizer: PreTrainedTokenizerBase,
    processor: Qwen2VLImageProcessorPil,
    scenes: Sequence[Scene],
    random: Random,
    guessed: float,
) -> dict[str, torch.Tensor]:
    """Return the model's inputs: a conversation about each scene, with questions in random order. Labels are the
    answers with their end tokens; a fraction of the answers is guessed."""
    images = processor([one.picture for one in scenes], return_tensors="pt")
    rows, labels = [], []
    for one in scenes:
        questions = one.questions()
        random.shuffle(questions)
        row, label = [], []
        for number, (question, answer) in enumerate(questions):
            if random.random() < guessed:
                answer = random.choice(choices(question))
            asked = tokenizer.encode(prompt(question, is_first=number == 0))
            said = tokenizer.encode(f"{answer}{tokenizer.eos_token}")
            row += asked + said
            label += [-100] * len(asked) + said
        rows.append(torch.tensor(row))
        labels.append(torch.tensor(label))
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return dict(
        input_ids=ids,
        attention_mask=pad([torch.ones_like(row) for row in rows], batch_first=True),
        labels=pad(labels, batch_first=True, padding_value=-100),
        mm_token_type_ids=(ids == tiny_vision.IMAGE_ID).int(),
        **images,
    )


def prompt(question: str, is_first: bool) -> str:
    """Return a rendered question with one placeholder per feature of the image, or a further question."""
    image = f"<|vision_start|>{4 * '<|image_pad|>'}<|vision_end|>"
    start = f"<|im_start|>user\n{image}" if is_first else "\n<|im_start|>user\n"
    return f"{start}{question}<|im_end|>\n<|im_start|>assistant\n"


class Scenes(Task):
    """Answer a question about a picture. The share is the fraction of correct answers: about 0.3 at the start, and at
    most about 0.3 without seeing the picture.

    In the control, each prompt has the picture of another one.
    """

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        model = folder.parent / "reader"  # shared with the control
        if not model.exists():
            write_reader(model)
        rows = write_scenes(folder / "scenes.parquet", 1024, seed=1, shuffled=shuffled)
        return [
            f"model={{path: {model}, vision: true}}",
            f"data={{source: {rows}, image_column: images}}",
            "rewards.functions=[{function: exact_match}]",
            "rollout.max_new_tokens=4",
            "run.export=false",
        ]

    def shares(self, start: Path, run: Path) -> list[float]:
        return [fmean(row["response"].strip() == row["answer"] for row in step) for step in sampled_rows(run)]
