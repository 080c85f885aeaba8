"""Tiny models that know how turns are written, and seldom write the right ones: the start of runs in environments.

Each is a random model that imitates rollouts whose choices were made at random, with little weight on the right ones.
Its tokenizer has tags and names as single tokens, so that its turns are of a few tokens, and other text by characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tiny_model import CHARACTERS, CHAT_TEMPLATE, tiny_tokenizer, write_tiny_llama

Text = Sequence[tuple[str, bool]]
"""The parts of a rollout, each with whether the policy says it."""

LETTERS, DIGITS = "abcdefgh", "01234567"
SEARCH_WORDS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>", "Doc 1(Title: ")
CALL, NAMES = ("<tool_call>", "</tool_call>"), ("add", "multiply")
ARGUMENTS = ('{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")
TOOL_TEMPLATE = "{% if tools %}{{ '<|system|>' + tools | length | string + eos_token }}{% endif %}" + CHAT_TEMPLATE
"""A template that has a place for tools, and says no more of them than how many there are."""


@dataclass(frozen=True)
class Agent:
    """A model to be made.

    demonstrate   makes a rollout of random choices
    rollouts      how many of them each update imitates
    characters    those that are tokens beside the words; others are not seen
    """

    words: Sequence[str]
    demonstrate: Callable[[Random], Text]
    updates: int
    template: str = CHAT_TEMPLATE
    rollouts: int = 32
    characters: str = CHARACTERS

    def write(self, folder: Path) -> Path:
        """Write the model into the folder. Return it."""
        write_tiny_llama(folder, num_kv_heads=2)
        tokenizer = tiny_tokenizer(128, self.words, self.template, self.characters)
        tokenizer.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        imitate(model, tokenizer, self.demonstrate, self.updates, self.rollouts)
        model.save_pretrained(folder)
        return folder


def imitate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Callable[[Random], Text],
    updates: int,
    rollouts: int,
) -> None:
    """Train the model on what the policy says in so many rollouts an update."""
    torch.set_num_threads(1)  # matrices are small, and cores are for others, too
    random = Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, updates)
    for _ in range(updates):
        ids, labels = batch(tokenizer, [demonstrate(random) for _ in range(rollouts)])
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def batch(tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, int64 [B, T], padded on the right; a label is -100 where nothing is to be learned."""
    rows, labels = [], []
    for text in texts:
        parts = [(tokenizer.encode(part), said) for part, said in text]
        rows.append([token for part, _ in parts for token in part])
        labels.append([token if said else -100 for part, said in parts for token in part])
    longest = max(map(len, rows))
    padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([row + [-100] * (longest - len(row)) for row in labels])


def seldom_searched(random: Random) -> Text:
    """Return a rollout that now and then searches for what is asked, else for any letter; and now and then answers
    what it finds, else any number."""
    asked, found = random.choice(LETTERS), random.choice(DIGITS)
    sought = asked if random.random() < 0.35 else random.choice(LETTERS)
    said = found if random.random() < 0.35 else random.choice(DIGITS)
    return [
        (f"<|user|>{asked}<eos><|assistant|>", False),
        (f"<search>{sought}</search>", True),
        (f"\n\n<information>Doc 1(Title: {sought}) {found}</information>\n\n", False),
        (f"<answer>{said}</answer>", True),
    ]


def seldom_placed(random: Random) -> Text:
    """Return a rollout that now and then says the place of a letter in the alphabet, else any number."""
    parts: list[tuple[str, bool]] = []
    for letter in random.sample(LETTERS, 2):
        said = DIGITS[LETTERS.index(letter)] if random.random() < 0.35 else random.choice(DIGITS)
        parts += [(f"<|user|>{letter}<eos><|assistant|>", False), (f"{said}<eos>", True)]
    return parts


def seldom_calculated(random: Random) -> Text:
    """Return a rollout that calls one tool or two with the right numbers, a little more often the right one than the
    other, and answers the last result."""
    a, b, c = (random.randint(2, 5) for _ in range(3))
    question, right = random.choice(((f"{a} * {b} + {c}", NAMES[::-1]), (f"({a} + {b}) * {c}", NAMES)))
    parts = [(f"<|system|>2<eos><|user|>What is {question}?<eos><|assistant|>", False)]
    value = a
    for name, other in list(zip(right, (b, c), strict=True))[: random.randint(1, 2)]:
        name = name if random.random() < 0.2 else random.choice(NAMES)
        call = f'<tool_call>{{"name": "{name}", "arguments": {{"a": {value}, "b": {other}}}}}</tool_call><eos>'
        value = value + other if name == "add" else value * other
        parts += [(call, True), (f"<|tool|>{value}<eos><|assistant|>", False)]
    return [*parts, (f"{value}<eos>", True)]


SEARCHER = Agent(SEARCH_WORDS, seldom_searched, updates=200)
CALCULATOR = Agent((*CALL, *NAMES, *ARGUMENTS), seldom_calculated, updates=500, template=TOOL_TEMPLATE)
SPELLER = Agent((), seldom_placed, updates=200)
