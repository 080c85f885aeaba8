"""Tiny random models with tokenizers, written as Hugging Face folders that transformers and vLLM can load."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megarl.models.families import TRANSFORMERS_TYPES

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, EOS_ID = 0, 1
SHARDED_VOCAB = 300
"""Vocabulary size for tensor parallelism. Megatron pads it to 384 rows with TP3 and to 512 with TP2, so that each rank
has tokens, and the last also padding. With 128, all ranks but the first would have only padding."""
# In byte-level BPE, Ċ is a newline and Ġ a space.
CHARACTERS = "ĊĠ" + string.digits + string.ascii_letters + string.punctuation
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TRIMMING_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] | trim + eos_token }}"
    "{% endfor %}"
)


def write_tiny_llama(
    folder: Path,
    *,
    model_type: str = "llama",
    vocab_size: int = 128,
    hidden_size: int = 64,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    num_layers: int = 2,
    intermediate_size: int = 128,
    max_positions: int = 256,
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """Write a model of a family whose config.json has Llama's keys.

    The head dim hidden_size / num_heads must be one that vLLM's CPU attention supports (32, 64 …).
    """
    return write_tiny_model(
        folder,
        model_type,
        seed,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        num_hidden_layers=num_layers,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
    )


def write_tiny_model(folder: Path, model_type: str, seed: int = 0, **config_json: Any) -> Path:
    """Write float32 weights, config, generation config and tokenizer into `folder`, and return it.

    All parameters are random, including norms and biases, so that swapped tensors are noticed.

    Args:
        config_json: keys of the family's config.json.
    """
    known = TRANSFORMERS_TYPES.get(model_type, model_type)
    config = AutoConfig.for_model(
        known, **config_json, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=PAD_ID, dtype="float32"
    )
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    if known != model_type:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"model_type": model_type}))
    tiny_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def add_mtp_layer(folder: Path) -> Path:
    """Add an MTP layer to a DeepSeek-V3, GLM-4.5 or Qwen model, and return its folder. It resembles the last layer, so
    that it predicts some tokens of an untrained model."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(5)
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]

    def noisy(tensor: torch.Tensor, scale: float = 0.3) -> torch.Tensor:
        return tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)

    is_qwen = config["model_type"].startswith("qwen3")
    prefix, new = f"model.layers.{last}.", "mtp." if is_qwen else f"model.layers.{last + 1}."
    inner = f"{new}layers.0." if is_qwen else new
    layer = {inner + name.removeprefix(prefix): noisy(w) for name, w in weights.items() if name.startswith(prefix)}
    names, zero = ("enorm", "hnorm", "shared_head.norm"), 1.0
    if is_qwen:  # norms are stored minus one
        names, zero = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), 0.0
    projection = f"{new}{'fc' if is_qwen else 'eh_proj'}.weight"
    layer[projection] = noisy(torch.cat((torch.eye(hidden), torch.eye(hidden) / 2), 1), 0.1)
    for name in names:
        layer[f"{new}{name}.weight"] = zero + 0.1 * torch.randn(hidden, generator=generator)
    count = {"num_nextn_predict_layers": 1}
    if is_qwen:
        # Qwen3-Next's config.json does not contain the number of MTP layers.
        count = {} if config["model_type"] == "qwen3_next" else {"mtp_num_hidden_layers": 1}
    else:
        layer[new + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        layer[new + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | layer, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | count))
    return folder


def write_eagle_draft(
    folder: Path,
    policy: Path,
    vocab: int | None = None,
    has_embedding: bool = False,
    is_speculators: bool = False,
) -> Path:
    """Write an EAGLE-3 draft of a policy, and return its folder. Its attention attends almost only to the last token,
    whose embedding it passes on, so that it predicts some tokens of a policy with a large embedding.

    Args:
        vocab: number of tokens that it predicts with an output layer of its own. None: it predicts all with the
            policy's.
        has_embedding: whether it has a copy of the policy's embedding.
        is_speculators: whether config.json has the format of vLLM's speculators library.
    """
    config, weights = json.loads((policy / "config.json").read_text()), load_file(policy / "model.safetensors")
    hidden, head_dim, layer_ids = config["hidden_size"], 32, [0, 1, config["num_hidden_layers"]]
    generator = torch.Generator().manual_seed(7)
    layer = "layers.0." if is_speculators else "midlayer."

    def noisy(*shape: int, scale: float = 0.01) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    zero = 1.0 if config["model_type"].startswith(("qwen3_next", "qwen3_5")) else 0.0  # norms are stored minus one
    tensors = {"fc.weight": noisy(hidden, 3 * hidden), "norm.weight": zero + weights["model.norm.weight"]}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = 1 + noisy(hidden, scale=0.1)
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"{layer}self_attn.{name}.weight"] = noisy(hidden, 2 * hidden)
        # Rotary embeddings rotate these biases, so that attention scores fall with the distance between tokens.
        tensors[f"{layer}self_attn.{name}.bias"] = torch.full((hidden,), 0.0 if name == "v_proj" else 6.0)
    tensors[f"{layer}self_attn.v_proj.weight"][:, :hidden] += torch.eye(hidden)
    tensors[f"{layer}self_attn.o_proj.weight"] = torch.eye(hidden) + noisy(hidden, hidden)
    tensors[f"{layer}self_attn.o_proj.bias"] = noisy(hidden)
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{layer}mlp.{name}.weight"] = noisy(hidden, hidden)
    embedding = weights["model.embed_tokens.weight"]
    if has_embedding:
        tensors["embed_tokens.weight"] = embedding.clone()
    if vocab is not None:
        drafted = torch.randperm(len(embedding), generator=generator)[:vocab].sort().values
        tensors["lm_head.weight"] = weights.get("lm_head.weight", embedding)[drafted]
        tensors["d2t"] = drafted - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(len(embedding), dtype=torch.bool).index_fill(0, drafted, True)
    sizes = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=True,
        head_dim=head_dim,
        hidden_act="silu",
        hidden_size=hidden,
        intermediate_size=hidden,
        max_position_embeddings=config["max_position_embeddings"],
        num_attention_heads=hidden // head_dim,
        num_hidden_layers=1,
        num_key_value_heads=hidden // head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        vocab_size=len(embedding),
    )
    written = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab or len(embedding)}
    written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    if is_speculators:
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
        verifier = {"name_or_path": str(policy), "architectures": config["architectures"]}
        written = dict(
            architectures=["Eagle3Speculator"],
            speculators_model_type="eagle3",
            speculators_config=dict(algorithm="eagle3", proposal_methods=[proposal], verifier=verifier),
            transformer_layer_config=sizes,
            draft_vocab_size=vocab or len(embedding),
            eagle_aux_hidden_state_layer_ids=layer_ids,
            norm_before_residual=False,
        )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def store_as_mxfp4(folder: Path, seed: int = 0) -> None:
    """Replace the experts' weights in a folder of gpt-oss with random MXFP4 blocks of about the same size."""
    generator, tensors = torch.Generator().manual_seed(seed), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales = (experts, rows, columns // 32, 16), (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 124, scales, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))


def write_tiny_experts(
    folder: Path, num_layers: int = 2, dense_layers: Sequence[int] = (1,), vocab_size: int = 128
) -> Path:
    """Write a mixture-of-experts model with some dense layers, by default the second."""
    return write_tiny_model(
        folder,
        "qwen3_moe",
        vocab_size=vocab_size,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=num_layers,
        intermediate_size=96,
        max_position_embeddings=64,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=list(dense_layers),
    )


def tiny_tokenizer(
    vocab_size: int = 128,
    words: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    characters: str = CHARACTERS,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and per word.

    It drops other characters. Words are not special tokens. Filler tokens pad the vocabulary and are never produced by
    encoding. It is byte-level BPE without merges, equal to transformers' Qwen2 tokenizer with this vocabulary.
    """
    tokens = [*SPECIAL_TOKENS, *characters, *words]
    assert vocab_size >= len(tokens), f"vocab_size {vocab_size} < {len(tokens)}"
    tokens += [f"<filler{i}>" for i in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=chat_template,
    )


def merging_tokenizer(*merges: str, vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with these merges, each written with a space between its parts.

    Ġ is a space, Ċ a newline. The chat template begins with <s> and trims message contents.
    """
    special = ("<s>", "</s>")
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<filler{i}>" for i in range(len(tokens), vocab_size)]
    pairs = [tuple(merge.split()) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=TRIMMING_TEMPLATE
    )


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Set all weights to random values with std 0.1: logits then have std near 1, so that rounding does not change an
    argmax. Convolutions have std 0.5: their outputs are normalized, which amplifies the rounding of small values. The
    biases before gpt-oss's activations have std 5, so that some channels exceed the activation's limits.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            is_zero_centered = parameter.dim() == 1 and name.endswith("weight") and not parameter.any()
            parameter.normal_(std=0.1, generator=generator)
            if "conv1d" in name:
                parameter.mul_(5)
            if name.endswith("gate_up_proj_bias"):
                parameter.mul_(50)
            if "norm" in name and not is_zero_centered:
                parameter.add_(1.0)
