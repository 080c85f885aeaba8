"""Pack multiples required by a layout: sequence parallelism splits into tp parts, context parallelism into two chunks
per rank."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.load import load
from megarl.megatron.model import layer_spec
from megarl.megatron.packing import packing_of
from megarl.models.mtp import add_mtp
from megarl.models.multimodal import text_config
from megarl.models.token_cost import TokenCost
from megarl.models.vision import add_vision
from tests.paths import BASE
from tests.published_models import CONFIGS, VISION_CONFIGS

LLAMA = dict(
    model_type="llama",
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=8,
    num_hidden_layers=8,
    intermediate_size=128,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
ALONE = dict(shares_prompts=True, document_multiple=1, pack_multiple=1, microbatch_multiple=1, num_ranks=1)
CASES = [
    # layout, whether Transformer Engine is installed, differences from a single process
    ("{}", False, {}),
    ("{tp: 4}", False, {}),
    ("{tp: 4, sequence_parallel: true}", False, {"pack_multiple": 4}),
    ("{cp: 3}", False, {"pack_multiple": 6}),
    ("{cp: 2, tp: 4, sequence_parallel: true}", False, {"pack_multiple": 16}),
    ("{pp: 4}", False, {}),
    ("{pp: 4, vpp: 2}", False, {"microbatch_multiple": 4}),
    ("{dp: 5}", False, {"num_ranks": 5}),
    ("{}", True, {}),
    ("{tp: 4, sequence_parallel: true, pp: 2}", True, {"pack_multiple": 4}),
    ("{cp: 3}", True, {"shares_prompts": False, "document_multiple": 6, "pack_multiple": 6}),
]


@pytest.mark.parametrize(("layout", "transformer_engine", "changes"), CASES)
def test_multiples_match_the_layout(monkeypatch, layout: str, transformer_engine: bool, changes: dict[str, Any]):
    monkeypatch.setattr(layer_spec, "uses_transformer_engine", lambda: transformer_engine)
    config = load(BASE, ["model.path=m", "data.source=arithmetic", f"actor.layout={layout}"])
    requirements = packing_of(config.actor, LLAMA)
    assert {name: getattr(requirements, name) for name in ALONE} == ALONE | changes


@pytest.mark.parametrize(
    ("layout", "multiple"), [("{}", 1), ("{tp: 2, sequence_parallel: true}", 1), ("{cp: 2}", 4), ("{cp: 4}", 8)]
)
def test_recurrent_models_split_documents_and_share_no_prompts(layout: str, multiple: int):
    config = load(BASE, ["model.path=m", "data.source=arithmetic", f"actor.layout={layout}"])
    requirements = packing_of(config.actor, CONFIGS["Qwen3.5-27B"])
    assert not requirements.shares_prompts
    assert requirements.document_multiple == multiple and requirements.pack_multiple % multiple == 0


def test_training_mtp_packs_each_sample_with_its_prompt():
    config = load(BASE, ["model.path=m", "data.source=arithmetic"])
    kept, trained = (packing_of(config.actor, add_mtp(CONFIGS["GLM-4.6"], is_trained)) for is_trained in (False, True))
    assert kept.shares_prompts and not trained.shares_prompts


def test_budget_is_per_rank_and_fp8_fills_blocks():
    fp8 = ["actor.fp8=mxfp8", "model.dtype=bfloat16", "actor.layout={cp: 2, tp: 2, sequence_parallel: true}"]
    config = load(BASE, ["model.path=m", "data.source=arithmetic", "actor.tokens_per_microbatch=4096", *fp8])
    requirements = packing_of(config.actor, LLAMA)
    assert (requirements.token_budget, requirements.pack_multiple) == (2 * 4096, 4 * 2 * 32)


@pytest.mark.parametrize(("frozen", "is_trained"), [("[]", True), ("[model.visual.*]", False)])
def test_costs_include_the_vision_tower(frozen: str, is_trained: bool):
    hf_config = add_vision(text_config(VISION_CONFIGS["Qwen2.5-VL-7B"]))
    keys = ["actor.layout={tp: 2, cp: 2, pp: 2, dp: 3}", f"actor.frozen={frozen}", "model.vision=true"]
    config = load(BASE, ["model.path=m", "data.source=arithmetic", *keys])
    assert packing_of(config.actor, hf_config).cost == TokenCost.of_model(hf_config, is_trained, num_ranks=8)
