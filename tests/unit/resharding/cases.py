"""Random models and layouts, and the expected shards of ranks and workers, computed by plain tensor algebra."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from hypothesis import strategies as st

from megarl.config.model_schema import Layout
from megarl.models.huggingface import replicates_kv_heads
from megarl.models.multimodal import WHOLE, WITH_TOWER


def layout_of(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    first: int | None = None,
    last: int | None = None,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
) -> Layout:
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        sequence_parallel=False,
        first_stage_layers=first,
        last_stage_layers=last,
    )


def config_of(**changes: Any) -> dict[str, Any]:
    config = dict(
        model_type="llama",
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=2,
        intermediate_size=18,
        vocab_size=37,
        tie_word_embeddings=False,
    )
    return config | changes


def random_checkpoint(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Generate a checkpoint from the definition of the model, independently of the family's declaration."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": random(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = random(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = random(hidden)
        is_delta_net = linear_attention(config, i)
        if config["model_type"] in LATENT_TYPES:
            tensors |= {f"{layer}{name}": random(*shape) for name, shape in latent_attention(config).items()}
        if is_delta_net:
            tensors |= {f"{layer}{name}": random(*shape) for name, shape in delta_net(config).items()}
        has_heads = config["model_type"] not in LATENT_TYPES and not is_delta_net
        gates = query if is_gated_delta(config) else 0
        for name, rows in (("q", query + gates), ("k", key), ("v", key)) if has_heads else ():
            tensors[layer + f"self_attn.{name}_proj.weight"] = random(rows, hidden)
            if config["model_type"] in ("qwen2", "qwen2_5_vl_text") or config.get("attention_bias"):
                tensors[layer + f"self_attn.{name}_proj.bias"] = random(rows)
            if (config["model_type"].startswith("qwen3") or config.get("use_qk_norm")) and name != "v":
                tensors[layer + f"self_attn.{name}_norm.weight"] = random(config["head_dim"])
        if has_heads:
            tensors[layer + "self_attn.o_proj.weight"] = random(hidden, query)
        if config["model_type"] in ("gpt_oss", "llama") and config.get("attention_bias"):
            tensors[layer + "self_attn.o_proj.bias"] = random(hidden)
        if config["model_type"] == "gpt_oss":
            shapes = {"self_attn.sinks": (config["num_attention_heads"],), **interleaved_experts(config)}
            tensors |= {f"{layer}{name}": random(*shape) for name, shape in shapes.items()}
            continue
        if router := router_of(config, i):
            tensors[f"{layer}{router}.weight"] = random(NUM_EXPERTS, hidden)
        if router and config["model_type"] in BIASED_ROUTERS:
            tensors[f"{layer}mlp.gate.e_score_correction_bias"] = random(NUM_EXPERTS)
            shared = config["n_shared_experts"] * config["moe_intermediate_size"]
            for name, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
                tensors[f"{layer}mlp.shared_experts.{name}_proj.weight"] = random(*shape)
        if router and is_gated_delta(config):
            shared = config["shared_expert_intermediate_size"]
            tensors[f"{layer}mlp.shared_expert_gate.weight"] = random(1, hidden)
            for name, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
                tensors[f"{layer}mlp.shared_expert.{name}_proj.weight"] = random(*shape)
        rows = config["moe_intermediate_size"] if router == "mlp.gate" else inner
        for mlp in mlps(config, i):
            for name, shape in zip(mlp, ((rows, hidden), (rows, hidden), (hidden, rows)), strict=True):
                tensors[f"{layer}{name}.weight"] = random(*shape)
                if config.get("mlp_bias"):
                    tensors[f"{layer}{name}.bias"] = random(shape[0])
    if WITH_TOWER in config:
        tensors |= {f"model.visual.{name}": random(*shape) for name, shape in tower(config).items()}
    return fused(tensors) if config["model_type"] == "phi3" else tensors


def tower(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a vision tower's tensors (transformers' Qwen2_5_VisionTransformerPretrainedModel and
    Qwen3VLVisionModel), with merges of 2 × 2 patches."""
    vision, is_gated = config["vision_config"], config["model_type"] == "qwen2_5_vl_text"
    size, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (size,)} | ({} if is_gated else {f"{name}.bias": (size,)})

    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (size, 3, 2, 1, 1)}
    if not is_gated:
        shapes |= {"patch_embed.proj.bias": (size,), "pos_embed.weight": (vision["num_position_embeddings"], size)}
    for layer in range(vision["depth"]):
        block = norm("norm1", size) | norm("norm2", size)
        block |= linear("attn.qkv", 3 * size, size) | linear("attn.proj", size, size)
        rows = ("gate_proj", "up_proj") if is_gated else ("linear_fc1",)
        for name in rows:
            block |= linear(f"mlp.{name}", inner, size)
        block |= linear(f"mlp.{'down_proj' if is_gated else 'linear_fc2'}", size, inner)
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    names = ("ln_q", "mlp.0", "mlp.2") if is_gated else ("norm", "linear_fc1", "linear_fc2")
    mergers = {"merger": size} | {
        f"deepstack_merger_list.{i}": 4 * size for i in range(len(vision["deepstack_visual_indexes"]))
    }
    for merger, normalized in mergers.items():
        parts = norm(names[0], normalized) | linear(names[1], 4 * size, 4 * size) | linear(names[2], out, 4 * size)
        shapes |= {f"{merger}.{name}": shape for name, shape in parts.items()}
    return shapes


def vllm_tower(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tower's tensors in vLLM: all of them on each worker, with fused gate and up projections."""
    tensors = {}
    for name, tensor in checkpoint.items():
        if not name.startswith("model.visual.") or ".up_proj." in name:
            continue
        if ".gate_proj." in name:
            tensor = torch.cat([tensor, checkpoint[name.replace(".gate_proj.", ".up_proj.")]])
        tensors[name.removeprefix("model.").replace(".gate_proj.", ".gate_up_proj.")] = tensor
    return tensors


def interleaved_experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the router and of separate experts (transformers' GptOssExperts, transposed)."""
    hidden, rows = config["hidden_size"], config["intermediate_size"]
    into, out = {"weight": (2 * rows, hidden), "bias": (2 * rows,)}, {"weight": (hidden, rows), "bias": (hidden,)}
    shapes = {"mlp.router.weight": (NUM_EXPERTS, hidden), "mlp.router.bias": (NUM_EXPERTS,)}
    for expert in range(NUM_EXPERTS):
        for name, kinds in (("gate_up_proj", into), ("down_proj", out)):
            shapes |= {f"mlp.experts.{expert}.{name}.{kind}": shape for kind, shape in kinds.items()}
    return shapes


def stacked(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the checkpoint with gpt-oss's experts stacked as in its files: weights [experts, columns, rows]."""
    tensors, experts = {}, {}
    for name, tensor in checkpoint.items():
        prefix, separator, rest = name.partition(".mlp.experts.")
        if separator:
            _, projection, kind = rest.split(".")
            stack = f"{prefix}{separator}{projection}{'_bias' if kind == 'bias' else ''}"
            experts.setdefault(stack, []).append(tensor.t())
        else:
            tensors[name] = tensor
    return tensors | {name: torch.stack(parts) for name, parts in experts.items()}


def is_gated_delta(config: dict[str, Any]) -> bool:
    return config["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def linear_attention(config: dict[str, Any], layer: int) -> bool:
    """Return whether a layer is a gated delta net: all but every second one in these tests."""
    return is_gated_delta(config) and (layer + 1) % config["full_attention_interval"] != 0


def delta_net(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a gated delta net's tensors (transformers' Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet)."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        projections = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        projections = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    shapes = {f"{name}.weight": (rows, hidden) for name, rows in projections.items()}
    shapes |= {"conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"])}
    shapes |= {"A_log": (heads,), "dt_bias": (heads,), "norm.weight": (config["linear_value_head_dim"],)}
    return {f"linear_attn.{name}": shape for name, shape in (shapes | {"out_proj.weight": (hidden, values)}).items()}


def delta_net_parts(config: dict[str, Any], checkpoint: dict[str, torch.Tensor], layer: str) -> list[torch.Tensor]:
    """Return the projections to queries, keys, values, gates, step sizes and decays, each by head."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, copies = config["linear_key_head_dim"], value_heads // key_heads
    values = copies * config["linear_value_head_dim"]
    get = {name: checkpoint.get(f"{layer}linear_attn.in_proj_{name}.weight") for name in ("qkvz", "ba", "qkv", *"zba")}
    if config["model_type"] == "qwen3_next":
        parts = get["qkvz"].unflatten(0, (key_heads, -1)).split([key_dim, key_dim, values, values], 1)
        parts += get["ba"].unflatten(0, (key_heads, -1)).split([copies, copies], 1)
        return [part.flatten(0, 1) for part in parts]
    keys = key_heads * key_dim
    return [*get["qkv"].split([keys, keys, key_heads * values]), get["z"], get["b"], get["a"]]


def delta_net_shard(config: dict[str, Any], checkpoint: dict[str, torch.Tensor], layer: str, tp: int, rank: int):
    """Return the tensors that trainer and engine split alike, by their names in the checkpoint."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    get = {name: checkpoint[f"{layer}linear_attn.{name}"] for name in ("A_log", "dt_bias", "norm.weight")}
    channels = checkpoint[f"{layer}linear_attn.conv1d.weight"].split([keys, keys, values])
    return {
        "A_log": get["A_log"].chunk(tp)[rank],
        "dt_bias": get["dt_bias"].chunk(tp)[rank],
        "norm.weight": get["norm.weight"],
        "conv1d.weight": torch.cat([part.chunk(tp)[rank] for part in channels]),
        "out_proj.weight": checkpoint[f"{layer}linear_attn.out_proj.weight"].chunk(tp, 1)[rank],
    }


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fuse the checkpoint's tensors as in Phi-3's checkpoints."""
    result = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            result[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            result[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, tensors[name.replace("gate", "up")]])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            result[name] = tensor
    return result


def unfused(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if config["model_type"] != "phi3":
        return tensors
    key = config["num_key_value_heads"] * config["head_dim"]
    result = {}
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            parts = tensor.split([len(tensor) - 2 * key, key, key])
            result |= {name.replace("qkv", x): part for x, part in zip("qkv", parts, strict=True)}
        elif "gate_up" in name:
            halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
            result |= {name.replace("gate_up", x): half for x, half in halves}
        else:
            result[name] = tensor
    return result


def latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of DeepSeek-V3's attention tensors (arXiv 2412.19437, section 2.1.1)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    content, position = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, kv_rank, query_rank = config["v_head_dim"], config["kv_lora_rank"], config["q_lora_rank"]
    queries = heads * (content + position)
    direct = {"q_proj.weight": (queries, hidden)}
    latent = {
        "q_a_proj.weight": (query_rank, hidden),
        "q_a_layernorm.weight": (query_rank,),
        "q_b_proj.weight": (queries, query_rank),
    }
    others = {
        "kv_a_proj_with_mqa.weight": (kv_rank + position, hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (content + value), kv_rank),
        "o_proj.weight": (hidden, heads * value),
    }
    return {f"self_attn.{name}": shape for name, shape in ((latent if query_rank else direct) | others).items()}


def router_of(config: dict[str, Any], layer: int) -> str | None:
    """Return the name of a layer's router; None for dense layers."""
    match config["model_type"]:
        case "mixtral":
            return "block_sparse_moe.gate"
        case family if family in BIASED_ROUTERS and layer >= config["first_k_dense_replace"]:
            return "mlp.gate"
        case "qwen3_moe" | "qwen3_next" | "qwen3_vl_moe_text" if layer not in config.get("mlp_only_layers", ()):
            return "mlp.gate"
        case "qwen3_5_moe_text":
            return "mlp.gate"
        case "gpt_oss":
            return "mlp.router"
    return None


def mlps(config: dict[str, Any], layer: int) -> list[tuple[str, str, str]]:
    """Return the names of the gate, up and down projections of a layer's MLP, or of each of its experts."""
    match router_of(config, layer):
        case None:
            return [("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
        case "mlp.gate":
            prefix, names = "mlp.experts", ("gate_proj", "up_proj", "down_proj")
        case _:
            prefix, names = "block_sparse_moe.experts", ("w1", "w3", "w2")
    return [tuple(f"{prefix}.{expert}.{name}" for name in names) for expert in range(NUM_EXPERTS)]


RENAMED = (
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    ("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
    ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    ("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    ("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    ("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ("mlp.router.bias", "mlp.router.bias"),
)
"""(Megatron name, Hugging Face name) of tensors in a layer that every rank holds completely."""

SPLIT_BY_ROWS = (
    ("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    ("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    ("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
)
"""As above, but for tensors of latent attention of which each rank holds the rows of its heads."""


def megatron_shard(
    config: dict[str, Any],
    checkpoint: dict[str, torch.Tensor],
    tp: int,
    tp_rank: int,
    chunks: list[range],
    first: bool,
    last: bool,
    vocab_multiple: int,
    experts: tuple[range, int, int],
) -> dict[str, torch.Tensor]:
    """Return a rank's shard as megatron-core's converters compute it.

    QKV is interleaved by KV head; gate and up are halves of each rank's rows.

    Args:
        experts: indices of the rank's experts, expert tensor-parallel size, and expert tensor-parallel rank.
    """
    checkpoint = unfused(config, checkpoint)
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]

    def qkv(layer: str, kind: str) -> torch.Tensor:
        parts = [checkpoint[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv"]
        heads = [part.reshape(kv_heads, -1, head_dim, *part.shape[1:]) for part in parts]
        if is_gated_delta(config):  # each query head is followed by its gate
            heads = [heads[0][:, ::2], heads[0][:, 1::2], *heads[1:]]
        interleaved = torch.cat(heads, dim=1)
        return interleaved.chunk(tp)[tp_rank].reshape(-1, *parts[0].shape[1:])

    def padded(name: str) -> torch.Tensor:
        return _padded(checkpoint[name], vocab_multiple * tp).chunk(tp)[tp_rank]

    tensors = {}
    if first:
        visual = {name: tensor for name, tensor in checkpoint.items() if name.startswith("model.visual.")}
        tensors |= {name.replace("model.visual.", "chunk0.vision."): tensor for name, tensor in visual.items()}
        tensors["chunk0.embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight")
    for chunk, local, i in [(c, local, i) for c, layers in enumerate(chunks) for local, i in enumerate(layers)]:
        hf, megatron = f"model.layers.{i}.", f"chunk{chunk}.decoder.layers.{local}."
        tensors |= {megatron + local: checkpoint[hf + name] for local, name in RENAMED if hf + name in checkpoint}
        if config["model_type"] in LATENT_TYPES:
            split = [(local, checkpoint[hf + name]) for local, name in SPLIT_BY_ROWS if hf + name in checkpoint]
            tensors |= {megatron + local: tensor.chunk(tp)[tp_rank] for local, tensor in split}
        for kind in [kind for kind in ("weight", "bias") if f"{hf}self_attn.k_proj.{kind}" in checkpoint]:
            tensors[f"{megatron}self_attention.linear_qkv.{kind}"] = qkv(hf, kind)
        if linear_attention(config, i):
            parts = [part.chunk(tp)[tp_rank] for part in delta_net_parts(config, checkpoint, hf)]
            tensors[megatron + "self_attention.in_proj.weight"] = torch.cat(parts)
            shard = delta_net_shard(config, checkpoint, hf, tp, tp_rank)
            named = {name.replace("norm.", "out_norm."): tensor for name, tensor in shard.items()}
            tensors |= {f"{megatron}self_attention.{name}": tensor for name, tensor in named.items()}
        router = router_of(config, i)
        if f"{hf}mlp.shared_experts.up_proj.weight" in checkpoint:
            gate, up, down = (checkpoint[f"{hf}mlp.shared_experts.{x}_proj.weight"] for x in ("gate", "up", "down"))
            halves = [half.chunk(tp)[tp_rank] for half in (gate, up)]
            tensors[megatron + "mlp.shared_experts.linear_fc1.weight"] = torch.cat(halves)
            tensors[megatron + "mlp.shared_experts.linear_fc2.weight"] = down.chunk(tp, 1)[tp_rank]
        if f"{hf}mlp.shared_expert.up_proj.weight" in checkpoint:
            gate, up, down = (checkpoint[f"{hf}mlp.shared_expert.{x}_proj.weight"] for x in ("gate", "up", "down"))
            halves = [half.chunk(tp)[tp_rank] for half in (gate, up)]
            tensors[megatron + "mlp.shared_experts.linear_fc1.weight"] = torch.cat(halves)
            tensors[megatron + "mlp.shared_experts.linear_fc2.weight"] = down.chunk(tp, 1)[tp_rank]
        if router:
            tensors[megatron + "mlp.router.weight"] = checkpoint[f"{hf}{router}.weight"]
        if config["model_type"] == "gpt_oss":
            tensors[f"{megatron}self_attention.core_attention.softmax_offset"] = checkpoint[
                f"{hf}self_attn.sinks"
            ].chunk(tp)[tp_rank]
            for j, number in enumerate(experts[0]):
                for ours, theirs in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                    for kind in ("weight", "bias"):
                        tensor = checkpoint[f"{hf}mlp.experts.{number}.{theirs}.{kind}"]
                        tensors[f"{megatron}mlp.experts.local_experts.{j}.{ours}.{kind}"] = tensor
        is_separate = router and config["model_type"] != "gpt_oss"
        for j, number in enumerate(experts[0] if is_separate else [] if router else [0]):
            gate, up, down = mlps(config, i)[number]
            mlp = f"{megatron}mlp.experts.local_experts.{j}" if router else f"{megatron}mlp"
            parts, part = experts[1:] if router else (tp, tp_rank)
            for kind in [kind for kind in ("weight", "bias") if f"{hf}{up}.{kind}" in checkpoint]:
                halves = [checkpoint[f"{hf}{name}.{kind}"].chunk(parts)[part] for name in (gate, up)]
                tensors[f"{mlp}.linear_fc1.{kind}"] = torch.cat(halves)
            tensors[f"{mlp}.linear_fc2.weight"] = checkpoint[f"{hf}{down}.weight"].chunk(parts, 1)[part]
        if (attention_out := checkpoint.get(hf + "self_attn.o_proj.weight")) is not None:
            tensors[megatron + "self_attention.linear_proj.weight"] = attention_out.chunk(tp, dim=1)[tp_rank]
    if last:
        tensors[f"chunk{len(chunks) - 1}.decoder.final_layernorm.weight"] = checkpoint["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            tensors[f"chunk{len(chunks) - 1}.output_layer.weight"] = padded("lm_head.weight")
        elif not first:
            tensors[f"chunk{len(chunks) - 1}.output_layer.weight"] = padded("model.embed_tokens.weight")
    return tensors


def vllm_shard(config: dict[str, Any], checkpoint: dict[str, torch.Tensor], tp: int, rank: int):
    """Return a worker's shard as vLLM's weight loaders compute it."""
    checkpoint = unfused(config, checkpoint)
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]

    def kv(tensor: torch.Tensor) -> torch.Tensor:
        copies = max(1, tp // kv_heads)
        heads = tensor.reshape(kv_heads, head_dim, *tensor.shape[1:]).repeat_interleave(copies, dim=0)
        return heads.chunk(tp)[rank].flatten(0, 1)

    tensors = expert_stacks(config, checkpoint, tp, rank)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        if linear_attention(config, i):
            shard = delta_net_shard(config, checkpoint, layer, tp, rank)
            if config["model_type"] == "qwen3_next":
                for name in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
                    shard[name] = checkpoint[f"{layer}linear_attn.{name}"].chunk(tp)[rank]
            else:
                parts = [part.chunk(tp)[rank] for part in delta_net_parts(config, checkpoint, layer)]
                shard["in_proj_qkvz.weight"], shard["in_proj_ba.weight"] = torch.cat(parts[:4]), torch.cat(parts[4:])
            tensors |= {f"{layer}linear_attn.{name}": tensor for name, tensor in shard.items()}
    for name, tensor in checkpoint.items():
        if ".experts." in name or ".linear_attn." in name or name.startswith("model.visual."):
            continue
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = _padded(tensor, 64).chunk(tp)[rank]
        elif "q_a_proj" in name:
            key_value = checkpoint[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
            tensors[name.replace("q_a_proj", "fused_qkv_a_proj")] = torch.cat([tensor, key_value])
        elif "kv_a_proj" in name:
            if config["q_lora_rank"] is None:
                tensors[name] = tensor
        elif "_b_proj" in name or ("q_proj" in name and config["model_type"] in LATENT_TYPES) or "sinks" in name:
            tensors[name] = tensor.chunk(tp)[rank]
        elif (
            "norm" in name
            or ".gate." in name
            or ".router." in name
            or "shared_expert_gate" in name
            or "o_proj.bias" in name
            or "down_proj.bias" in name
        ):
            tensors[name] = tensor
        elif "o_proj" in name or "down_proj" in name:
            tensors[name] = tensor.chunk(tp, dim=1)[rank]
        elif "q_proj" in name:
            keys_and_values = [kv(checkpoint[name.replace("q_proj", x)]) for x in ("k_proj", "v_proj")]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat([tensor.chunk(tp)[rank], *keys_and_values])
        elif "gate_proj" in name:
            halves = [tensor, checkpoint[name.replace("gate_proj", "up_proj")]]
            tensors[name.replace("gate", "gate_up")] = torch.cat([half.chunk(tp)[rank] for half in halves])
    if WITH_TOWER in config:
        return {f"language_model.{name}": tensor for name, tensor in tensors.items()} | vllm_tower(checkpoint)
    if config["model_type"] != "gpt_oss":
        return tensors
    names = {name: name.replace("self_attn", "attn").replace("embed_tokens", "embedding") for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


def expert_stacks(config: dict[str, Any], checkpoint: dict[str, torch.Tensor], tp: int, rank: int):
    """Return the stacked expert weights, [experts, rows, columns] with the first two axes flattened."""
    tensors = {}
    if config["model_type"] == "gpt_oss":
        for name, stack in stacked(checkpoint).items():
            if ".experts." not in name:
                continue
            part = stack.mT if name.endswith("proj") else stack
            if "gate_up" in name:
                part = part.chunk(tp, 1)[rank]
            elif name.endswith("proj"):
                part = part.chunk(tp, 2)[rank]
            elif rank > 0:  # only the first worker adds the bias to the sum over workers
                part = torch.zeros_like(part)
            ours = name.replace("gate_up_proj", "w13_weight").replace("down_proj", "w2_weight")
            tensors[ours.replace("experts.", "experts.routed_experts.").replace("weight_bias", "bias")] = part.flatten(
                0, 1
            )
        return tensors
    for i in [i for i in range(config["num_hidden_layers"]) if router_of(config, i)]:
        layer, names = f"model.layers.{i}.", mlps(config, i)
        halves = [[checkpoint[f"{layer}{x}.weight"].chunk(tp)[rank] for x in expert[:2]] for expert in names]
        downs = [checkpoint[f"{layer}{expert[2]}.weight"].chunk(tp, dim=1)[rank] for expert in names]
        stack = layer + names[0][0].partition("0.")[0]
        tensors[f"{stack}routed_experts.w13_weight"] = torch.stack([torch.cat(pair) for pair in halves]).flatten(0, 1)
        tensors[f"{stack}routed_experts.w2_weight"] = torch.stack(downs).flatten(0, 1)
    return tensors


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % multiple))


NUM_EXPERTS = 4
LATENT_TYPES, BIASED_ROUTERS = ("deepseek_v3", "kimi_k2"), ("deepseek_v3", "glm4_moe", "kimi_k2")
BIASED = dict(
    first_k_dense_replace=1,
    n_routed_experts=NUM_EXPERTS,
    n_shared_experts=2,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)
LATENT = BIASED | dict(kv_lora_rank=5, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=3)
GPT_OSS = dict(attention_bias=True, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2)


def with_tower(whole: str, **text: Any) -> dict[str, Any]:
    """Return the config of a model with a vision tower, whose sizes `with_fitting_tower` completes."""
    vision = dict(depth=2, hidden_size=8, num_heads=2, intermediate_size=5, patch_size=1, spatial_merge_size=2)
    vision |= dict(temporal_patch_size=2, num_position_embeddings=4, window_size=2)
    vision["deepstack_visual_indexes"] = [0] if whole.startswith("qwen3_vl") else []
    return {
        "model_type": f"{whole}_text",
        "vision_config": vision,
        WHOLE: {"model_type": whole},
        WITH_TOWER: True,
        **text,
    }


def with_fitting_tower(config: dict[str, Any]) -> dict[str, Any]:
    """Fit the tower, if any, to the sizes of the text model."""
    if WITH_TOWER not in config:
        return config
    tower = config["vision_config"] | {"out_hidden_size": config["hidden_size"]}
    return config | {"vision_config": tower, "rope_parameters": {"mrope_section": [config["head_dim"] // 2, 0, 0]}}


MODELS = [
    with_tower("qwen2_5_vl"),
    with_tower("qwen3_vl"),
    with_tower("qwen3_vl_moe", num_experts=NUM_EXPERTS),
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True},
    {"model_type": "llama", "mlp_bias": True},
    {"model_type": "mistral"},
    {"model_type": "phi3"},
    {"model_type": "qwen2"},
    {"model_type": "qwen3"},
    {"model_type": "mixtral", "num_local_experts": NUM_EXPERTS},
    {"model_type": "qwen3_moe", "num_experts": NUM_EXPERTS},
    {"model_type": "qwen3_moe", "num_experts": NUM_EXPERTS, "mlp_only_layers": (0, 2)},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 3},
    {"model_type": "qwen3_5_text", "full_attention_interval": 2},
    {"model_type": "qwen3_5_moe_text", "full_attention_interval": 2, "num_experts": NUM_EXPERTS},
    {"model_type": "qwen3_next", "full_attention_interval": 2, "num_experts": NUM_EXPERTS, "mlp_only_layers": (1,)},
    {"model_type": "kimi_k2", **LATENT, "q_lora_rank": 3},
    {"model_type": "glm4_moe", **BIASED},
    {"model_type": "glm4_moe", **BIASED, "attention_bias": True, "use_qk_norm": True},
    {"model_type": "gpt_oss", **GPT_OSS},
]


def gated_delta_sizes(key_heads: int, copies: int) -> dict[str, int]:
    """Return sizes in which keys, values and the convolution's width differ."""
    heads = dict(linear_num_key_heads=key_heads, linear_num_value_heads=copies * key_heads)
    return heads | dict(linear_key_head_dim=2, linear_value_head_dim=3, linear_conv_kernel_dim=4)


@st.composite
def configs(draw: st.DrawFn) -> tuple[dict[str, Any], Layout, int]:
    """Draw a model, a Megatron layout and a vLLM tensor-parallel size that divide it."""
    tp, vllm_tp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = tp * draw(st.sampled_from([1, 2]))
    if kv_heads % vllm_tp and vllm_tp % kv_heads:
        kv_heads = lcm(kv_heads, vllm_tp)
    heads = lcm(kv_heads, vllm_tp) * draw(st.sampled_from([1, 3]))
    pp = draw(st.sampled_from([1, 2, 3]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    first, middle, last = (vpp * count for count in draw(st.tuples(*[st.integers(1, 2)] * 3)))
    ends = dict(first=first, last=last) if pp > 1 else {}
    model = draw(st.sampled_from(MODELS))
    is_interleaved = model["model_type"] == "gpt_oss"
    if not replicates_kv_heads(model["model_type"]):
        kv_heads = lcm(kv_heads, vllm_tp)
    config = config_of(
        **model,
        hidden_size=draw(st.integers(1, 5)),
        num_hidden_layers=first if pp == 1 else first + (pp - 2) * middle + last,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        intermediate_size=lcm(tp, vllm_tp) * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 100)),
        moe_intermediate_size=lcm(tp, vllm_tp) * draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()) and not is_interleaved,
        **gated_delta_sizes(lcm(tp, vllm_tp) * draw(st.sampled_from([1, 3])), draw(st.integers(1, 2))),
        shared_expert_intermediate_size=lcm(tp, vllm_tp) * draw(st.integers(1, 3)),
    )
    config = with_fitting_tower(config)
    dp = draw(st.integers(1, 2))
    sizes = (1,) if is_interleaved else (1, tp)
    etp, ep = draw(st.sampled_from([(e, n) for e in sizes for n in (1, 2, 4) if tp * dp % (e * n) == 0]))
    etp = None if ep == 1 and not is_interleaved else etp
    return config, layout_of(tp, pp, dp=dp, vpp=vpp, ep=ep, etp=etp, **ends), vllm_tp
