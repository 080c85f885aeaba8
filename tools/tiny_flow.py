"""Pre-train a tiny flow-matching model that draws two digits, and write it as a diffusers folder.

    python tools/tiny_flow.py OUT

The model is a small Z-Image with all parts of its pipeline. For captions such as "the number 47", it draws white digits
in images of 16 × 24 pixels. Its text encoder is random, and its VAE is nearly the identity. Only the transformer is
trained. 40 % of its training images have the caption of a random number, so that RL can still improve the model.
OUT/captions.jsonl contains all captions, each with its digits as the answer.
"""

from __future__ import annotations

import argparse
import copy
import json
import string
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from megarl.rewards.digits import glyph

PLACES = 2
NUMBERS = [f"{number:0{PLACES}}" for number in range(10**PLACES)]
CAPTIONS = [f"the number {number}" for number in NUMBERS]

SPECIAL = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PATCH, CAPTION_DIM, FONT_SIZE = 4, 64, 15
SHIFT = 3.0
"""Shift of the noise levels, in training and in the scheduler."""

WRONG, EMPTY = 0.4, 0.1
"""Fraction of images with a random number as caption, and fraction with an empty caption, which guidance needs."""

BATCH, STEPS, WARMUP_STEPS, LEARNING_RATE, AVERAGING = 32, 600, 30, 3e-3, 0.02

CONSTANT = 32.0
"""Value of the VAE's constant channels. It is large compared with the pixel values."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    tokens = [*SPECIAL, "Ġ", *string.digits, *string.ascii_lowercase]
    bpe = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, **names, extra_special_tokens=list(SPECIAL[3:]), chat_template=TEMPLATE
    )


def text_encoder(vocab_size: int) -> Qwen3Model:
    """Return a random text encoder whose token embeddings outweigh what its layers add, so that digits differ."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=CAPTION_DIM,
        intermediate_size=2 * CAPTION_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
    )
    model = Qwen3Model(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(std=1.0 if "embed" in name else 0.05)
    return model


def vae() -> AutoencoderKL:
    """Return a VAE of one latent channel that is nearly the identity for gray images: latents are pixels.

    Its inner channels are x, −x, C and −C. The constants fix the scale of the group norm, and silu(x) − silu(−x) = x.
    """
    model = AutoencoderKL(
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.zero_()
    for part, num_inputs in ((model.encoder, 3), (model.decoder, 1)):
        part.conv_in.weight[0, :, 1, 1], part.conv_in.weight[1, :, 1, 1] = 1 / num_inputs, -1 / num_inputs
        part.conv_in.bias[2], part.conv_in.bias[3] = CONSTANT, -CONSTANT
        part.conv_norm_out.weight.fill_(CONSTANT / 2**0.5)
    model.encoder.conv_out.bias[1] = -30.0  # the log of a negligible variance
    model.encoder.conv_out.weight[0, :2, 1, 1] = torch.tensor([1.0, -1.0])
    model.decoder.conv_out.weight[:, :2, 1, 1] = torch.tensor([1.0, -1.0])
    return model


def transformer() -> ZImageTransformer2DModel:
    model = ZImageTransformer2DModel(
        all_patch_size=[PATCH],
        in_channels=1,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=CAPTION_DIM,
        t_scale=100.0,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    for token in (model.x_pad_token, model.cap_pad_token):
        torch.nn.init.normal_(token, std=0.02)
    return model


def draw(numbers: np.ndarray) -> torch.Tensor:
    """Return images of numbers [B], float32 [B, 1, height, width] in [−1, 1]."""
    images = [np.concatenate([glyph(int(digit), FONT_SIZE) for digit in NUMBERS[number]], 1) for number in numbers]
    return torch.from_numpy(np.stack(images)[:, None]) * 2 - 1


def pretrain(
    model: ZImageTransformer2DModel, captions: list[torch.Tensor], empty: torch.Tensor
) -> ZImageTransformer2DModel:
    """Train the model with flow matching. Return a moving average of its weights."""
    random = np.random.default_rng(0)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1, 2 * (1 - step / STEPS))
    )
    start = time.monotonic()
    for step in range(STEPS):
        shown = random.integers(0, len(NUMBERS), BATCH)
        named = np.where(random.random(BATCH) < WRONG, random.integers(0, len(NUMBERS), BATCH), shown)
        texts = [empty if random.random() < EMPTY else captions[number] for number in named]
        images = draw(shown)
        noise = torch.randn(images.shape)
        sigmas = torch.randn(BATCH).sigmoid()
        sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
        x = torch.lerp(images, noise, sigmas[:, None, None, None])
        # Z-Image takes 1 − σ and returns −v.
        output, *_ = model(list(x[:, :, None]), 1 - sigmas, texts, return_dict=False, patch_size=PATCH)
        loss = (-torch.stack(output)[:, :, 0] - (noise - images)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, AVERAGING)
        if step % 100 == 99:
            print(f"step {step + 1} of {STEPS}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)
    return average


def write(folder: Path) -> None:
    """Write the model and its captions."""
    torch.manual_seed(0)
    tokens = tokenizer()
    model = transformer()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    pipeline = ZImagePipeline(scheduler, vae(), text_encoder(len(tokens)), tokens, model)
    embeddings, _ = pipeline.encode_prompt([*CAPTIONS, ""], do_classifier_free_guidance=False)
    *captions, empty = (embedding.clone() for embedding in embeddings)
    pipeline.register_modules(transformer=pretrain(model, captions, empty))
    pipeline.save_pretrained(folder)
    rows = [{"prompt": caption, "answer": number} for caption, number in zip(CAPTIONS, NUMBERS, strict=True)]
    (folder / "captions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    torch.set_num_threads(1)  # more threads are not faster, and the result would depend on the number of cores
    write(parser.parse_args().out)
