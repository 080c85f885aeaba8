"""An MTP layer, frozen or trained, does not change the policy's training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megarl.config.schema import Config
from megarl.core.sample import Sample
from megarl.megatron.model.build import named_parameters
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.models.mtp import add_mtp
from megarl.models.token_cost import TokenCost
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import whole as whole_piece
from megarl.resharding.transports.safetensors import SafetensorsFolder
from tests.closeness import LOSS_FLOOR, assert_close, close_to, expected, load
from tests.distributed.test_families import DEEPSEEK, GATED_DELTA, GATED_DELTA_EXPERTS, GLM
from tests.distributed.test_optimizer import state_of
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Outcome,
    RankResult,
    config_of,
    own_batch,
    random_groups,
    separate_experts,
    train,
    whole_tensors,
)
from tests.tiny_model import SHARDED_VOCAB, add_mtp_layer, write_tiny_model

GROUPS = random_groups(0, SHARDED_VOCAB)
CASES = {
    "GLM-4.6: TP2, SP, EP2, ETP1": ("glm4_moe", GLM, "tp: 2, sequence_parallel: true, ep: 2, etp: 1"),
    "DeepSeek-V3: PP2": ("deepseek_v3", DEEPSEEK, "pp: 2, first_stage_layers: 2"),
    "Qwen3-Next: TP2, SP, EP2, ETP1": (
        "qwen3_next",
        GATED_DELTA | GATED_DELTA_EXPERTS | dict(intermediate_size=72, mlp_only_layers=[1]),
        "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    ),
    "Qwen3.5, tied: PP2": (
        "qwen3_5_text",
        GATED_DELTA | dict(intermediate_size=72, tie_word_embeddings=True),
        "pp: 2",
    ),
    "Qwen3.5, experts: PP2, EP2": ("qwen3_5_moe_text", GATED_DELTA | GATED_DELTA_EXPERTS, "pp: 2, dp: 2, ep: 2"),
}
KEPT, TRAINED = "actor.mtp.loss_coefficient=0.0", "actor.mtp.loss_coefficient=0.3"


def trained(folder: Path, layout: str, *overrides: str, updates=(GROUPS,), **packing) -> list[RankResult]:
    config = config_of(folder, "actor.tokens_per_microbatch=256", f"actor.layout={{{layout}}}", *overrides)
    return run_ranks(config.actor.layout.world_size, train, config, folder, [*updates], **packing)


@pytest.mark.parametrize("case", exhaustive_but(CASES, "GLM-4.6: TP2, SP, EP2, ETP1"))
def test_mtp_layer_is_kept_and_changes_nothing(tmp_path, case):
    """The policy's gradients and updated weights are the same bits as without the layer."""
    family, sizes, layout = CASES[case]
    folder = add_mtp_layer(write_tiny_model(tmp_path / "model", family, **sizes))
    without, kept = trained(folder, layout), trained(folder, layout, KEPT)
    for one, other in zip(without, kept, strict=True):
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
        assert not any(gradient.any() for name, gradient in other.gradients.items() if name not in one.gradients)
    with SafetensorsFolder(folder) as saved:
        weights = whole_tensors(add_mtp(read_config(folder)), kept, "weights")
        layer = weights.keys() - huggingface_holder(read_config(folder)).shapes.keys()
        assert len(layer) >= 15 and all(
            torch.equal(weights[name], saved.read("", name, whole_piece(tuple(weights[name].shape)))) for name in layer
        )


TRAINED_CASES = {
    "GLM-4.6": ("glm4_moe", GLM, "tp: 1"),
    "GLM-4.6: TP2, SP, EP2, ETP1": ("glm4_moe", GLM, "tp: 2, sequence_parallel: true, ep: 2, etp: 1"),
    "GLM-4.6: TP2, PP2, VPP2, recomputed": (
        *("glm4_moe", GLM | dict(num_hidden_layers=4), "tp: 2, sequence_parallel: true, pp: 2, vpp: 2"),
        *("actor.recompute=full", "actor.overlap_communication=true"),
    ),
    "GLM-4.6: CP2": ("glm4_moe", GLM, "cp: 2"),
    "GLM-4.6: DP2": ("glm4_moe", GLM, "dp: 2"),
    "Qwen3.5: TP2, SP": ("qwen3_5_text", GATED_DELTA, "tp: 2, sequence_parallel: true"),
    "Qwen3.5, experts: PP2, EP2": ("qwen3_5_moe_text", GATED_DELTA | GATED_DELTA_EXPERTS, "pp: 2, dp: 2, ep: 2"),
    "DeepSeek-V3: TP2": ("deepseek_v3", DEEPSEEK, "tp: 2, sequence_parallel: true"),
    "DeepSeek-V3: PP2": ("deepseek_v3", DEEPSEEK, "pp: 2, first_stage_layers: 2"),
}


@pytest.mark.parametrize("case", exhaustive_but(TRAINED_CASES, "DeepSeek-V3: PP2"))
def test_trained_mtp_layer_matches_reference(tmp_path, case):
    """The layer's loss, gradients and weights match the reference after two updates. The policy's gradient in the first
    update has the same bits as with the layer frozen."""
    family, sizes, layout, *overrides = TRAINED_CASES[case]
    folder = add_mtp_layer(write_tiny_model(tmp_path / "model", family, **sizes))
    packing = dict(shares_prompts=False, cost=TokenCost.of_model(read_config(folder)))  # the same microbatches
    kept, once = (trained(folder, layout, key, *overrides, **packing) for key in (KEPT, TRAINED))
    for one, other in zip(kept, once, strict=True):
        for name, gradient in one.gradients.items():
            assert ".mtp." in name or torch.equal(gradient, other.gradients[name]), name
        assert not one.metrics or one.metrics["policy/loss"] == other.metrics["policy/loss"]
    updates = (GROUPS, random_groups(1, SHARDED_VOCAB))
    ranks = trained(folder, layout, TRAINED, *overrides, updates=updates)
    exact, plain = expected(lambda: reference_outcome(folder, tmp_path / "deeper", updates))
    measured = sum(rank.metrics["mtp/loss"].value for rank in ranks if rank.metrics)
    assert measured == close_to(exact.loss, plain.loss, LOSS_FLOOR)
    for what in ("gradients", "weights"):
        whole = whole_tensors(add_mtp(read_config(folder)), ranks, what)
        found = {name: whole[name] for name in getattr(exact, what)}
        assert len(found) >= 15
        assert_close(found, getattr(exact, what), getattr(plain, what), what)


def updates_with_spoiled_layer(store, rank: int, config: Config, folder: Path, factors: list[float]) -> list[bool]:
    """Run an update for each factor, which multiplies the gradients of the layer's norms. Return whether each update
    leaves the rank's weights and state unchanged."""
    worker, unchanged = ActorWorker(config, folder, rank, store, threads=1), []
    parameters = named_parameters(worker.chunks)
    norms = [parameter for name, parameter in parameters.items() if ".mtp." in name and "norm" in name]
    for factor in factors:
        before = state_of(worker)
        hooks = [norm.register_hook(lambda gradient, factor=factor: factor * gradient) for norm in norms]
        worker.update(own_batch(config, worker, GROUPS, None))
        worker.end_step()
        for hook in hooks:
            hook.remove()
        unchanged.append(all(map(torch.equal, before, state_of(worker))))
    return unchanged


def test_all_ranks_skip_an_update_if_only_the_layer_has_a_nonfinite_gradient(tmp_path):
    """The layer is on the second rank."""
    folder = add_mtp_layer(write_tiny_model(tmp_path / "model", "deepseek_v3", **DEEPSEEK))
    config = config_of(folder, "actor.layout={pp: 2, first_stage_layers: 2}", TRAINED)
    ranks = run_ranks(2, updates_with_spoiled_layer, config, folder, [1.0, math.nan, 1.0, math.inf])
    assert ranks == [[False, True, False, True]] * 2


def reference_outcome(folder: Path, deeper: Path, updates) -> Outcome:
    reference = MtpReference(folder, deeper)
    for groups in updates:
        reference.update_both(groups)
    return reference.outcome()


NUMBERED = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
SEPARATE = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")
"""Names of the norms of the embedding and of the hidden state, of the projection and of the norm of the output."""


class MtpReference(GrpoReference):
    """GRPO with the MTP loss, one sample at a time."""

    def __init__(self, folder: Path, deeper: Path):
        super().__init__(folder, LR, EPS, TEMPERATURE)
        config = json.loads((folder / "config.json").read_text())
        self.deeper_prefix = f"model.layers.{config['num_hidden_layers']}."
        tensors = load_file(folder / "model.safetensors")
        is_separate = "mtp.fc.weight" in tensors
        self.inner = "mtp.layers.0." if is_separate else self.deeper_prefix
        names = NUMBERED if not is_separate else SEPARATE
        self.names = [(self.deeper_prefix if not is_separate else "mtp.") + name for name in names]
        self.offset = 1.0 if is_separate else 0.0  # Qwen's norms are stored minus one
        if not deeper.exists():  # a model whose last layer is the decoder layer inside the MTP layer
            shutil.copytree(folder, deeper)
            config["num_hidden_layers"] += 1
            if is_separate:
                config["layer_types"].append("full_attention")
            (deeper / "config.json").write_text(json.dumps(config))
            moved = {name.replace(self.inner, self.deeper_prefix): tensor for name, tensor in tensors.items()}
            save_file(moved, deeper / "model.safetensors", metadata={"format": "pt"})
        self.deeper = load(AutoModelForCausalLM, deeper)
        self.layer = self.deeper.model.layers[-1]
        self.others = {name: tensors[name].to(torch.get_default_dtype()).requires_grad_() for name in self.names}
        own = {self.inner + name: p for name, p in self.layer.named_parameters()}
        self.parameters = own | self.others
        self.mtp_optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0
        )

    def norm(self, number: int, x: torch.Tensor) -> torch.Tensor:
        weight = self.others[self.names[number]] + self.offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    def second_log_probs(self, sample: Sample) -> torch.Tensor:
        """Return the layer's log-probs of the response tokens after the first, [R - 1]."""
        ids = torch.tensor(sample.token_ids[None]).long()
        with torch.no_grad():
            hidden = self.model.model(ids).last_hidden_state[:, :-1]
            embedded = self.model.model.embed_tokens(ids[:, 1:])
        states = torch.cat((self.norm(0, embedded), self.norm(1, hidden)), -1) @ self.others[self.names[2]].T
        length = states.shape[1]
        positions = torch.arange(length)[None]
        states = self.layer(
            states,
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(states, position_ids=positions),
        )
        states = self.norm(3, states)
        logits = states[0] @ self.model.lm_head.weight.detach().T / self.temperature
        response = ids[0, len(sample.prompt.token_ids) + 1 :]
        predicted = logits[len(sample.prompt.token_ids) - 1 : -1] if len(response) else logits[:0]
        return torch.log_softmax(predicted, -1).gather(1, response[:, None])[:, 0]

    def update_both(self, groups) -> None:
        self.mtp_optimizer.zero_grad()
        losses = []
        for sample in (sample for group in groups for sample, _ in group):
            mask = torch.tensor(sample.response_mask)
            weight = mask[1:] / mask.sum().clamp(min=1)
            losses.append(-(weight * self.second_log_probs(sample)).sum())
        loss = torch.stack(losses).mean()
        (0.3 * loss).backward()
        self.value = float(loss.detach())
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items()}
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.update(groups, 0.0, clip_norm=1.0)
        self.mtp_optimizer.step()

    def outcome(self) -> Outcome:
        def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            rest = {name: tensor for name, tensor in tensors.items() if name in self.others}
            inside = {name: tensor for name, tensor in tensors.items() if name not in rest}
            inside = {name.replace(self.inner, self.deeper_prefix): tensor for name, tensor in inside.items()}
            found = separate_experts(revert_weight_conversion(self.deeper, inside))
            return rest | {name.replace(self.deeper_prefix, self.inner): tensor for name, tensor in found.items()}

        weights = {name: p.detach() for name, p in self.parameters.items()}
        return Outcome(self.value, 0.0, published(self.gradients), published(weights))
