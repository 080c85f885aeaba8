"""Classification checkpoints: a decoder with a score head in place of its language head.

These are Hugging Face's ...ForSequenceClassification (one row of scores per sample) and ...ForTokenClassification (one
per token): reward models, and critics, whose one label is the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.algorithms.specs import Kind

WEIGHT, BIAS = "score.weight", "score.bias"
"""Canonical names of the head's tensors, [labels, hidden] and [labels], which every tensor-parallel rank has whole."""

_KINDS: Mapping[str, Kind] = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The score head of a checkpoint: the kind of its classifier, and its shape."""

    kind: Kind
    num_labels: int
    bias: bool

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {WEIGHT: (self.num_labels, hidden)} | ({BIAS: (self.num_labels,)} if self.bias else {})


def score_head_of(hf_config: Mapping[str, Any]) -> ScoreHead | None:
    """Return the score head of a checkpoint, None for a language model."""
    architecture = next(iter(hf_config.get("architectures") or ()), "")
    kind = next((kind for suffix, kind in _KINDS.items() if architecture.endswith(suffix)), None)
    if kind is None:
        return None
    # transformers leaves its default of two labels out of config.json, and gives only token classifiers a bias.
    num_labels = len(hf_config.get("id2label") or (0, 1))
    bias = kind == "token" and hf_config.get("token_classification_bias", True)
    return ScoreHead(kind, num_labels, bias)


def as_classifier(hf_config: Mapping[str, Any], kind: Kind = "sequence") -> dict[str, Any]:
    """Return the config of the classifier with one label that has this model's decoder; that of a classifier, of
    whichever kind, stays as it is."""
    if score_head_of(hf_config) is not None:
        return dict(hf_config)
    architecture = next(iter(hf_config.get("architectures") or ()), "ForCausalLM")
    suffix = next(suffix for suffix, of_suffix in _KINDS.items() if of_suffix == kind)
    return {
        **hf_config,
        "architectures": [architecture.replace("ForCausalLM", suffix)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
