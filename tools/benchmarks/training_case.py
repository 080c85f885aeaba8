"""A case of training_step.py: a model, the lengths of its samples, and the settings of its updates."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmark import ROOT  # noqa: F401  makes tests.* importable

from tests.published_models import CONFIGS

Ids = tuple[list[int], list[int]]
"""A prompt and a response."""

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": CONFIGS["SmolLM2-135M"],
    "qwen3-0.6b": CONFIGS["Qwen3-0.6B"],
    "tiny": CONFIGS["SmolLM2-135M"]
    | {
        "hidden_size": 96,
        "num_attention_heads": 3,
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
        layout: keys of actor.layout.
        padded: whether every sample is padded to the longest.
        saves: number of checkpoints after the updates.
        has_teacher: whether the loss is the Jensen-Shannon divergence from a teacher as large as the model.
    """

    shape: str
    lengths: list[list[int]]
    updates: int
    threads: int
    microbatch: int
    layout: Mapping[str, int]
    padded: bool = False
    dtype: str = "float32"
    recompute: str = "none"
    saves: int = 0
    has_teacher: bool = False

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

    def ids(self) -> list[Ids]:
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


def timed(update: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    return seconds


def write_result(path: Path, result: Mapping[str, Any], *packages: str) -> None:
    """Write a side's result with the versions of these packages."""
    versions = {package: version(package) for package in packages}
    path.write_text(json.dumps({**result, "versions": versions}, indent=2) + "\n", encoding="utf-8")


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def padded(samples: Sequence[Ids]) -> dict[str, torch.Tensor]:
    """Return GRPOTrainer's tensors: prompts [samples, longest prompt] padded on the left, responses [samples, longest
    response] on the right, and the mask of each, 1 for a token."""
    widths = [max(len(sample[part]) for sample in samples) for part in (0, 1)]
    prompts = [torch.tensor([0] * (widths[0] - len(prompt)) + prompt) for prompt, _ in samples]
    responses = [torch.tensor(response + [0] * (widths[1] - len(response))) for _, response in samples]
    prompt_mask = [torch.arange(widths[0]) >= widths[0] - len(prompt) for prompt, _ in samples]
    response_mask = [torch.arange(widths[1]) < len(response) for _, response in samples]
    return {
        "prompt_ids": torch.stack(prompts),
        "prompt_mask": torch.stack(prompt_mask).long(),
        "completion_ids": torch.stack(responses),
        "completion_mask": torch.stack(response_mask).long(),
    }


def equal_lengths(num_samples: int, prompt: int, response: int) -> list[list[int]]:
    return [[prompt, response]] * num_samples


def mixed_lengths(num_samples: int, prompt: int, longest: int) -> list[list[int]]:
    """Return prompt and response lengths. Response lengths are log-normal: their logarithm has a standard deviation of
    1, and their median is an eighth of the longest.
    """
    source = random.Random(1)
    drawn = [source.lognormvariate(0, 1) * longest / 8 for _ in range(num_samples - 1)]
    return [[prompt, max(1, min(round(length), longest))] for length in [*drawn, longest]]
