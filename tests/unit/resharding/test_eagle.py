"""EAGLE-3 drafts: the tensors that their folders must have, and their size in an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.core.errors import UserError
from megarl.models.folder import read_config
from megarl.models.weight_files import read_headers
from megarl.resharding.families.eagle import check_eagle_weights, eagle_bytes
from tests.tiny_model import write_eagle_draft, write_tiny_llama

OPTIONS = [dict(vocab=96, has_embedding=True), dict(vocab=96), dict(is_speculators=True)]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "policy", tied=False)


def check(draft: Path, policy: Path, **sizes: int) -> None:
    check_eagle_weights(draft, read_headers(draft), read_config(draft), read_config(policy) | sizes)


def rewrite(draft: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a draft, or remove those that are None."""
    kept = load_file(draft / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, draft / "model.safetensors")


@pytest.mark.parametrize("options", OPTIONS)
def test_complete_drafts_are_accepted(options: dict[str, Any], policy: Path, tmp_path: Path) -> None:
    check(write_eagle_draft(tmp_path / "draft", policy, **options), policy)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fc.weight": None}, "has no tensor fc.weight"),
        ({"fc.weight": torch.zeros(64, 128)}, r"fc.weight has shape \(64, 128\), but config.json requires \(64, 192\)"),
        ({"midlayer.hidden_norm.weight": None}, "has no tensor layers.0.hidden_norm.weight"),
        ({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}, r"requires \(64, 128\)"),
        ({"lm_head.weight": None}, "has no tensor lm_head.weight"),
        ({"lm_head.weight": torch.zeros(128, 64)}, r"requires \(96, 64\)"),
        ({"embed_tokens.weight": torch.zeros(96, 64)}, r"requires \(128, 64\)"),
        ({"d2t": None}, "has no tensor d2t"),
        ({"d2t": torch.zeros(128, dtype=torch.int64)}, r"d2t has shape \(128,\) and dtype int64, .* requires 96 int"),
        ({"d2t": torch.zeros(96)}, "d2t has shape .* and dtype float32"),
        ({"d2t": torch.full((96,), 33)}, "maps its vocabulary to ids from 33 to 128, but the vocabulary .* 128 tokens"),
        ({"d2t": torch.full((96,), -1)}, "maps its vocabulary to ids from -1 to 94"),
    ],
)
def test_incomplete_drafts_are_refused(changed, message: str, policy: Path, tmp_path: Path) -> None:
    draft = write_eagle_draft(tmp_path / "draft", policy, vocab=96)
    check(draft, policy)
    rewrite(draft, **changed)
    with pytest.raises(UserError, match=f"{message}.* Fix: "):
        check(draft, policy)


def test_narrower_draft_needs_its_own_embedding(policy: Path, tmp_path: Path) -> None:
    """vLLM replaces only an embedding of the policy's width."""
    draft = write_eagle_draft(tmp_path / "draft", policy, vocab=96)
    with pytest.raises(UserError, match=r"has no tensor embed_tokens.weight"):
        check(draft, policy, hidden_size=128)


@pytest.mark.parametrize("options", OPTIONS)
def test_norms_before_the_projection_are_required(options, policy: Path, tmp_path: Path) -> None:
    draft = write_eagle_draft(tmp_path / "draft", policy, **options)
    written = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(written | dict(fc_norm=True, norm_before_fc=True)))
    norms = {f"fc_norm.{state}.weight": torch.ones(64) for state in range(3)}
    rewrite(draft, **norms)
    with pytest.raises(UserError, match=r"has no tensor input_norm.weight"):
        check(draft, policy)
    rewrite(draft, **{"input_norm.weight": torch.ones(192)})
    check(draft, policy)


def test_size_of_a_published_draft_is_known() -> None:
    """One of four ranks of a draft for Qwen3-32B has 16 query heads and 2 key-value heads over the embedding and a
    hidden state, its shards of the MLP and the vocabularies, and all of the norms and the projection of three hidden
    states."""
    published = dict(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        hidden_size=5120,
        intermediate_size=25600,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=1,
        head_dim=80,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        vocab_size=151936,
        draft_vocab_size=32000,
        tie_word_embeddings=False,
    )
    attention = (16 + 2 + 2) * 80 * 2 * 5120 + 16 * 80 * 5120
    elements = attention + 3 * 6400 * 5120 + 3 * 5120 * 5120 + 4 * 5120 + (151936 + 32000) // 4 * 5120
    assert eagle_bytes(published, 4, "bfloat16") == 2 * elements + 8 * 32000
