"""Tiny initial models for runs in environments: they write well-formed turns, but rarely the right ones.

Each is a random model trained to imitate rollouts with random choices, few of which are right. Its tokenizer has tags
and names as single tokens, which keeps turns short, and encodes other text character by character.
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
"""The parts of a rollout, each with a flag: whether the policy writes it."""

LETTERS, DIGITS = "abcdefgh", "01234567"
SEARCH_WORDS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>", "Doc 1(Title: ")
CALL, NAMES = ("<tool_call>", "</tool_call>"), ("add", "multiply")
ARGUMENTS = ('{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")
TOOL_TEMPLATE = "{% if tools %}{{ '<|system|>' + tools | length | string + eos_token }}{% endif %}" + CHAT_TEMPLATE
"""Chat template that renders only the number of tools."""


@dataclass(frozen=True)
class Agent:
    """The specification of an initial model.

    Attributes:
        words: single tokens besides the characters.
        demonstrate: returns a rollout with random choices.
        updates: number of imitation updates.
        rollouts: demonstrations per update.
        characters: characters with tokens; the tokenizer drops others.
    """

    words: Sequence[str]
    demonstrate: Callable[[Random], Text]
    updates: int
    template: str = CHAT_TEMPLATE
    rollouts: int = 32
    characters: str = CHARACTERS

    def write(self, folder: Path) -> Path:
        """Train the model, write it into the folder, and return the folder."""
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
    """Train the model on the policy's parts of `rollouts` demonstrations per update."""
    torch.set_num_threads(1)  # the matrices are small, and other processes need the cores
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
    """Return ids and labels, int64 [B, T], padded on the right. Tokens that are not trained on have the label -100."""
    rows, labels = [], []
    for text in texts:
        parts = [(tokenizer.encode(part), said) for part, said in text]
        rows.append([token for part, _ in parts for token in part])
        labels.append([token if said else -100 for part, said in parts for token in part])
    longest = max(map(len, rows))
    padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([row + [-100] * (longest - len(row)) for row in labels])


def seldom_searched(random: Random) -> Text:
    """Return a rollout that sometimes searches for the requested letter, else for a random one.

    It sometimes answers with the number that it found, else with a random one.
    """
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
    """Return a rollout about two letters. It sometimes states a letter's position in the alphabet, else a random
    number.
    """
    parts: list[tuple[str, bool]] = []
    for letter in random.sample(LETTERS, 2):
        said = DIGITS[LETTERS.index(letter)] if random.random() < 0.35 else random.choice(DIGITS)
        parts += [(f"<|user|>{letter}<eos><|assistant|>", False), (f"{said}<eos>", True)]
    return parts


def seldom_calculated(random: Random) -> Text:
    """Return a rollout that calls one or two tools with the right numbers and answers with the last result.

    It calls the right tool slightly more often than the wrong one.
    """
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
