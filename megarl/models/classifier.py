"""Support classification checkpoints: decoders with a score head in place of the LM head.

Hugging Face's ...ForSequenceClassification returns one row of scores per sample, and ...ForTokenClassification one per
token. These checkpoints are used as reward models, and as critics whose single label is the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.algorithms.specs import Kind

WEIGHT, BIAS = "score.weight", "score.bias"
"""Canonical names of the head's tensors, [labels, hidden] and [labels]. All tensor-parallel ranks hold full copies."""

_KINDS: Mapping[str, Kind] = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The score head of a classification checkpoint."""

    kind: Kind
    num_labels: int
    bias: bool

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {WEIGHT: (self.num_labels, hidden)} | ({BIAS: (self.num_labels,)} if self.bias else {})


def score_head_of(hf_config: Mapping[str, Any]) -> ScoreHead | None:
    """Return the score head described in config.json; None for a language model."""
    architecture = next(iter(hf_config.get("architectures") or ()), "")
    kind: Kind | None = next((kind for suffix, kind in _KINDS.items() if architecture.endswith(suffix)), None)
    if kind is None:
        return None
    # transformers omits the default of two labels from config.json. Only token classifiers have a bias.
    num_labels = len(hf_config.get("id2label") or (0, 1))
    bias = kind == "token" and hf_config.get("token_classification_bias", True)
    return ScoreHead(kind, num_labels, bias)


def as_classifier(hf_config: Mapping[str, Any], kind: Kind = "sequence") -> dict[str, Any]:
    """Return the config for a classifier with one label and this model's decoder. If the model is already a classifier,
    its config is returned unchanged, regardless of its kind."""
    if score_head_of(hf_config) is not None:
        return dict(hf_config)
    architecture = next(iter(hf_config.get("architectures") or ()), "ForCausalLM")
    suffix = next(suffix for suffix, suffix_kind in _KINDS.items() if suffix_kind == kind)
    return {
        **hf_config,
        "architectures": [architecture.replace("ForCausalLM", suffix)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
