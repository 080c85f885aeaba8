"""The weights of EAGLE-3 drafts, in checkpoints and in vLLM workers. Refits do not write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.errors import UserError
from megarl.models.eagle import EagleDraft
from megarl.models.shape import ModelShape
from megarl.models.weight_files import Header, files_by_tensor, open_file, require_names, require_tensors
from megarl.resharding.families.canonical import EMBEDDING, HEAD
from megarl.resharding.families.huggingface import huggingface_holder
from megarl.resharding.families.vllm import VOCABULARY_MULTIPLE, vllm_holder
from megarl.resharding.piece import num_bytes

TOKEN_MAP = "d2t"
"""Tensor [draft vocabulary] of offsets d: token i of the draft's vocabulary has id i + d[i] in the policy's."""


def eagle_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a draft's checkpoint, without the vocabulary map. The first layer's
    attention reads the embedding and a hidden state, each with a norm. Checkpoints may name this layer `midlayer`."""
    eagle, hidden = EagleDraft.of(hf_config), hf_config["hidden_size"]
    layers = huggingface_holder(_untied(hf_config)).shapes
    shapes = {name.removeprefix("model."): shape for name, shape in layers.items()}
    for projection in ("q_proj", "k_proj", "v_proj"):
        name = f"layers.0.self_attn.{projection}.weight"
        shapes[name] = (shapes[name][0], 2 * hidden)
    shapes |= {"layers.0.hidden_norm.weight": (hidden,), HEAD: (eagle.vocab, hidden)}
    return shapes | _input_shapes(hf_config)


def _untied(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    return {**hf_config, "tie_word_embeddings": False}


def _input_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the projection from the policy's hidden states, and of its norms."""
    eagle, count = EagleDraft.of(hf_config), EagleDraft.of(hf_config).num_states
    joint = {"input_norm.weight": (count * eagle.policy_hidden,)} if eagle.has_joint_norm else {}
    norms = {f"fc_norm.{state}.weight": (eagle.policy_hidden,) for state in range(count if eagle.has_norms else 0)}
    return {"fc.weight": (hf_config["hidden_size"], count * eagle.policy_hidden)} | joint | norms


def eagle_bytes(hf_config: Mapping[str, Any], tp: int, dtype: str) -> int:
    """Return the size in bytes of a draft in a vLLM worker. vLLM allocates the draft's embedding and output layer even
    if the policy's replace them."""
    eagle, model = EagleDraft.of(hf_config), ModelShape.of(hf_config)
    size = vllm_holder(_untied(hf_config), tp, 0, 0, dtype).shard.num_bytes
    rows = model.query // tp + 2 * max(1, model.kv_heads // tp) * model.head_dim
    vocabularies = [-(-vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE for vocab in (eagle.vocab, model.vocab)]
    added = rows + (vocabularies[0] - vocabularies[1]) // tp + model.num_layers
    size += num_bytes((added, model.hidden), dtype)
    size += sum(num_bytes(shape, dtype) for shape in _input_shapes(hf_config).values())
    return size + (eagle.vocab * np.dtype(np.int64).itemsize if eagle.vocab != model.vocab else 0)


def check_eagle_weights(
    folder: Path, headers: Mapping[str, Header], hf_config: Mapping[str, Any], policy: Mapping[str, Any]
) -> None:
    """Raise a UserError if the folder lacks a tensor that the policy cannot provide, or if its vocabulary map is
    invalid. Without this check, vLLM would draft random tokens, or fail.

    Args:
        headers: headers of the folder's tensors.
        policy: the policy's config.json.
    """
    named = {name.replace("midlayer.", "layers.0."): header for name, header in headers.items()}
    eagle, shapes = EagleDraft.of(hf_config), eagle_shapes(hf_config)
    embedding = EMBEDDING.removeprefix("model.")
    if embedding not in named and hf_config["hidden_size"] == policy["hidden_size"]:
        del shapes[embedding]
    if HEAD not in named and eagle.vocab == policy["vocab_size"]:
        del shapes[HEAD]
    require_tensors(folder, named, shapes)
    if eagle.vocab != policy["vocab_size"]:
        _check_token_map(folder, eagle.vocab, policy["vocab_size"])


def _check_token_map(folder: Path, size: int, vocab: int) -> None:
    files = files_by_tensor(folder)
    require_names(folder, files.keys(), [TOKEN_MAP])
    with open_file(files[TOKEN_MAP], "numpy") as file:
        differences = file.get_tensor(TOKEN_MAP)
    fix = "Fix: use the complete checkpoint of a draft that was trained for model.path"
    if differences.shape != (size,) or not np.issubdtype(differences.dtype, np.integer):
        raise UserError(
            f"{folder}: {TOKEN_MAP} has shape {differences.shape} and dtype {differences.dtype}, but the draft's "
            f"vocabulary requires {size} integers. {fix}"
        )
    ids = np.arange(size) + differences
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(
            f"{folder}: {TOKEN_MAP} maps its vocabulary to ids from {ids.min()} to {ids.max()}, but the vocabulary of "
            f"model.path has {vocab} tokens. {fix}"
        )
