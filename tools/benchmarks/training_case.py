"""A case of training_step.py: a model, the lengths of its samples, and the settings of its updates."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_hidden_layers": 28,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
    # As many layers as fit on one GPU with their optimizer state.
    "llama3.1-8b, 8 layers": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 4,
        "intermediate_size": 192,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark case.

    Attributes:
        lengths: prompt and response tokens of each sample.
        microbatch: microbatch size, in tokens for megarl and in samples for transformers and TRL.
        layout: overrides of actor.layout.
        padded: whether every sample is padded to the longest.
        saves: number of checkpoints after the updates.
    """

    shape: str
    lengths: list[list[int]]
    updates: int
    threads: int
    microbatch: int
    layout: list[str]
    padded: bool = False
    dtype: str = "float32"
    recompute: str = "none"
    saves: int = 0

    @property
    def hf_config(self) -> dict[str, Any]:
        return SHAPES[self.shape] | {
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
        }

    @property
    def longest(self) -> int:
        return max(prompt + response for prompt, response in self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens per update, without padding."""
        return sum(prompt + response for prompt, response in self.lengths)

    def ids(self) -> list[tuple[list[int], list[int]]]:
        """Return the prompt and response ids of each sample, the same for every side."""
        source = random.Random(0)
        vocab = SHAPES[self.shape]["vocab_size"]
        return [tuple([source.randrange(vocab) for _ in range(n)] for n in pair) for pair in self.lengths]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps(asdict(self)), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(self.hf_config), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Case:
        return cls(**json.loads((folder / "case.json").read_text(encoding="utf-8")))


def equal_lengths(num_samples: int, prompt: int, response: int) -> list[list[int]]:
    return [[prompt, response]] * num_samples


def mixed_lengths(num_samples: int, prompt: int, longest: int) -> list[list[int]]:
    """Return prompt and response lengths. Response lengths are log-normal with a standard deviation of 1 of the
    logarithm, and a median of an eighth of the longest."""
    source = random.Random(1)
    drawn = [source.lognormvariate(0, 1) * longest / 8 for _ in range(num_samples - 1)]
    return [[prompt, max(1, min(round(length), longest))] for length in [*drawn, longest]]
