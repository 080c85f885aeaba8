"""Tiny random vision-language models, written as Hugging Face folders that transformers and vLLM can load.

torchvision is not required: preprocessor_config.json is written without transformers' processors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.tiny_model import randomize

Kind = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_BYTES = 256
IDS = {token: NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
PAD_ID, EOS_ID = IDS["<|endoftext|>"], IDS["<|im_end|>"]
IMAGE_ID = IDS["<|image_pad|>"]
VOCAB_SIZE = 320

MERGE, TEMPORAL_PATCH, CHANNELS = 2, 2, 3
PATCH: dict[Kind, int] = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16, "qwen3_5": 16, "qwen3_5_moe": 16}
"""Height and width of a patch, in pixels."""

LARGEST_SIDE = 4
"""The side of the largest square image, in patches."""

_TEXT = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=EOS_ID,
    pad_token_id=PAD_ID,
)
_GROUPED = dict(num_attention_heads=4, head_dim=32)
_INTERLEAVED = dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)
_GATED_DELTA = _GROUPED | dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    layer_types=["linear_attention", "full_attention"] * 2,
    rms_norm_eps=1e-3,  # large, because the delta net's norm would amplify rounding errors of near-zero outputs
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        mrope_section=[3, 3, 2],
        mrope_interleaved=True,
    ),
)
_TEXTS: dict[Kind, dict[str, Any]] = {
    "qwen2_5_vl": dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6])),
    "qwen3_vl": _GROUPED | dict(rope_parameters=_INTERLEAVED),
    "qwen3_vl_moe": _GROUPED
    | dict(
        rope_parameters=_INTERLEAVED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,  # so that no expert matrix is square
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA
    | dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,  # so that no expert matrix is square
        shared_expert_intermediate_size=32,
    ),
}
_TOWER = dict(
    depth=3,
    hidden_size=64,
    num_heads=2,
    intermediate_size=96,
    in_channels=CHANNELS,
    temporal_patch_size=TEMPORAL_PATCH,
    spatial_merge_size=MERGE,
)
_GRID_POSITIONS = dict(num_position_embeddings=9)
_TOWERS: dict[Kind, dict[str, Any]] = {
    "qwen2_5_vl": dict(window_size=4 * 14, fullatt_block_indexes=[1], tokens_per_second=2),
    "qwen3_vl": _GRID_POSITIONS | dict(deepstack_visual_indexes=[0, 1]),
    "qwen3_vl_moe": _GRID_POSITIONS | dict(deepstack_visual_indexes=[0, 1]),
    "qwen3_5": _GRID_POSITIONS,
    "qwen3_5_moe": _GRID_POSITIONS,
}


def build(folder: Path, kind: Kind, seed: int = 0, tower: dict[str, Any] | None = None, **text: Any) -> Path:
    """Write float32 weights, configs and tokenizer of a vision-language model into `folder`, and return it.

    All parameters are random, including norms and biases, so that swapped tensors are noticed. Attention heads have 32
    channels, which vLLM's CPU attention supports. Images have up to 4 × 4 patches, which are 4 features.

    Args:
        tower: keys of vision_config that replace the defaults.
        text: keys of text_config that replace the defaults.
    """
    text = _TEXT | _TEXTS[kind] | text
    vision = _TOWER | dict(patch_size=PATCH[kind], out_hidden_size=text["hidden_size"]) | _TOWERS[kind] | (tower or {})
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        tie_word_embeddings=text["tie_word_embeddings"],
        dtype="float32",
    )
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("ln_q.weight"):  # a norm without "norm" in its name
                parameter.add_(1.0)
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    tokenizer().save_pretrained(folder)
    _write(folder / "preprocessor_config.json", _preprocessor(kind))
    _write(folder / "video_preprocessor_config.json", _preprocessor(kind) | _VIDEO[kind])
    generation = dict(eos_token_id=[EOS_ID, PAD_ID], pad_token_id=PAD_ID)
    _write(folder / "generation_config.json", generation)
    return folder


def _transpose_experts(file: Path) -> None:
    """Store stacked experts as [experts, columns, rows], as published checkpoints do. transformers reads both orders
    but writes [experts, rows, columns]."""
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def canonical(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a transformers model with canonical names and separate experts."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")
        path, experts, projection = name.partition(".experts.")
        for i, part in enumerate(tensor if experts else ()):
            names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            rows = zip(names, part.chunk(len(names)), strict=True)
            found |= {f"{path}.experts.{i}.{kind}.weight": value for kind, value in rows}
        found |= {} if experts else {name: tensor}
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and the special tokens of Qwen's vision-language models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
    )


_VIDEO: dict[Kind, dict[str, Any]] = {
    "qwen2_5_vl": dict(video_processor_type="Qwen2VLVideoProcessor"),
    "qwen3_vl": dict(video_processor_type="Qwen3VLVideoProcessor"),
    "qwen3_vl_moe": dict(video_processor_type="Qwen3VLVideoProcessor"),
    "qwen3_5": dict(video_processor_type="Qwen3VLVideoProcessor"),
    "qwen3_5_moe": dict(video_processor_type="Qwen3VLVideoProcessor"),
}


def _preprocessor(kind: Kind) -> dict[str, Any]:
    """Return preprocessor_config.json in the form of the published checkpoints: Qwen2.5-VL's has min_pixels and
    max_pixels, the others' have a size."""
    patch = PATCH[kind]
    smallest, largest = (MERGE * patch) ** 2, (LARGEST_SIDE * patch) ** 2
    shared = dict(patch_size=patch, temporal_patch_size=TEMPORAL_PATCH, merge_size=MERGE)
    if kind == "qwen2_5_vl":
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        names = dict(image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor")
        return names | shared | dict(min_pixels=smallest, max_pixels=largest, image_mean=mean, image_std=std)
    names = dict(image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor")
    size = dict(shortest_edge=smallest, longest_edge=largest)
    return names | shared | dict(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
