"""Memory of a rank for models of known size."""

from __future__ import annotations

import pytest

from megarl.cluster.memory.rank import layers_in_flight, rank_memory
from megarl.config.model_schema import Layout

QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "intermediate_size": 8960,
    "tie_word_embeddings": True,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
PARAMETERS = 1_543_714_304
"""Number of parameters of Qwen2.5-1.5B, 1.54B according to its model card."""


def layout(**sizes: int) -> Layout:
    one = dict(tp=1, pp=1, vpp=1, cp=1, ep=1, etp=None, dp=1, first_stage_layers=None, last_stage_layers=None)
    return Layout(**(one | sizes), sequence_parallel=False)


def test_state_of_a_known_model_has_its_size():
    memory = rank_memory(QWEN_1_5B, layout(), 0, 2, num_tokens=0, num_rows=0, num_microbatches=1)
    assert memory.weights == 2 * PARAMETERS
    assert memory.gradients == 4 * PARAMETERS
    assert memory.optimizer == 12 * PARAMETERS
    assert memory.activations == memory.head == 0
    assert memory.total == 18 * PARAMETERS


@pytest.mark.parametrize(("model", "sizes"), [(QWEN_1_5B, {"dp": 2}), (MIXTRAL_8X7B, {"tp": 2, "etp": 1, "ep": 2})])
def test_muon_stores_one_moment_per_matrix(model, sizes):
    adamw, muon = (rank_memory(model, layout(**sizes), 0, 2, 0, 0, 1, uses_muon=muon) for muon in (False, True))
    vocabulary = model["vocab_size"] * model["hidden_size"] * (1 if model["tie_word_embeddings"] else 2)
    assert muon.weights == adamw.weights
    # Biases, norms and routers, which are negligible, have two moments.
    assert muon.optimizer == pytest.approx(8 / 12 * adamw.optimizer + 4 / 2 * vocabulary, rel=1e-3)


def test_dp_shards_the_optimizer_and_tp_shards_all_state():
    whole, quarter = (rank_memory(QWEN_1_5B, layout(**sizes), 0, 2, 0, 0, 1) for sizes in ({}, {"dp": 2, "tp": 2}))
    assert quarter.optimizer == pytest.approx(whole.optimizer / 4, rel=1e-3)  # norms are on all ranks
    assert quarter.weights == pytest.approx(whole.weights / 2, rel=1e-3)


def test_recompute_saves_fewer_activations():
    modes = ("none", "selective", "full")
    kept = [rank_memory(QWEN_1_5B, layout(), 0, 2, 8192, 4096, 1, mode).activations for mode in modes]
    assert kept[0] > kept[1] > kept[2]
    assert kept[2] > 28 * 8192 * 1536 * 2  # the input of each layer


@pytest.mark.parametrize(
    ("pp", "vpp", "stage", "num_microbatches", "in_flight"),
    [
        (1, 1, 0, 8, 28),
        (4, 1, 0, 8, 28),  # 4 microbatches of 7 layers
        (4, 1, 3, 8, 7),
        (4, 1, 0, 2, 14),
        (4, 2, 0, 8, 38.5),  # 6 + 4 + 1 = 11 chunks of 3.5 layers
        (4, 2, 3, 8, 17.5),
    ],
)
def test_layers_in_flight(pp, vpp, stage, num_microbatches, in_flight):
    assert layers_in_flight(layout(pp=pp, vpp=vpp), stage, 28 // pp, num_microbatches) == in_flight


def test_expert_parallel_ranks_hold_all_state_once():
    ranks = layout(dp=8, ep=8)
    memory = [rank_memory(MIXTRAL_8X7B, ranks, rank, 2, 0, 0, 1) for rank in range(8)]
    assert sum(rank.optimizer for rank in memory) == pytest.approx(12 * 46_702_792_704, rel=1e-6)  # model card
    experts = 32 * 8 * 3 * 4096 * 14336  # layers, experts, matrices
    assert memory[0].weights == 2 * (46_702_792_704 - experts * 7 // 8)


def test_activations_depend_on_the_active_experts():
    """Doubling the experts without changing the number per token adds only router scores."""
    eight, sixteen = (MIXTRAL_8X7B | {"num_local_experts": count} for count in (8, 16))
    kept = [rank_memory(config, layout(), 0, 2, 4096, 0, 1).activations for config in (eight, sixteen)]
    assert kept[1] - kept[0] == 32 * 4096 * 9 * 8
