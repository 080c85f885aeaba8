"""Loading of diffusers folders, prompt encoding and its cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.errors import UserError
from megarl.rollout.diffusers.encoders import CACHE_BYTES
from megarl.rollout.diffusers.pipeline import ImageModel
from tests.closeness import FACTOR, assert_matches
from tests.tiny_image_model import CLIP_TOKENS, SHIFT, load_pipeline, write_tiny_image_model

EPSILON = torch.finfo(torch.float32).eps
TEXTS = ["a red cat", "", "A blue dog on a very long sofa under a tree"]


def load(folder: Path, offload: bool = False) -> ImageModel:
    return ImageModel.load(folder, torch.float32, offload)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["with T5", "without T5"])
def sd3_folder(request, tmp_path_factory) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp("sd3"), "SD3.5", has_t5=request.param == "with T5")


def test_sd3_captions_match_diffusers_pipeline(sd3_folder):
    captions = load(sd3_folder).encoder.encode(TEXTS)

    def plain() -> dict[str, torch.Tensor]:
        pipeline = load_pipeline(sd3_folder)
        tokens, _, pooled, _ = pipeline.encode_prompt([*TEXTS], None, None, do_classifier_free_guidance=False)
        return {"tokens": tokens, "pooled": pooled}

    actual = {name: torch.stack([getattr(captions[text], name) for text in TEXTS]) for name in ("tokens", "pooled")}
    assert actual["tokens"].shape[1] == CLIP_TOKENS + 256
    assert_matches(actual, plain, "captions")


def test_sd3_noise_levels_are_diffusers(sd3_folder):
    scheduler = load_pipeline(sd3_folder).scheduler
    for num_steps in (1, 2, 10):
        scheduler.set_timesteps(num_steps)
        assert load(sd3_folder).sigmas(num_steps) == pytest.approx(scheduler.sigmas.tolist(), abs=FACTOR * EPSILON)
    other = type(scheduler)(shift=2.0)
    other.set_timesteps(10)
    assert load(sd3_folder).sigmas(10, shift=2.0) == pytest.approx(other.sigmas.tolist(), abs=FACTOR * EPSILON)


def test_captions_match_diffusers_pipeline(folder):
    captions = load(folder).encoder.encode(TEXTS)

    def plain() -> dict[str, torch.Tensor]:
        pipeline, options = load_pipeline(folder), dict(do_classifier_free_guidance=False, max_sequence_length=96)
        return dict(zip(TEXTS, pipeline.encode_prompt([*TEXTS], **options)[0], strict=True))

    assert all(caption.pooled is None for caption in captions.values())
    assert_matches({text: caption.tokens for text, caption in captions.items()}, plain, "captions")


def test_long_captions_are_truncated_to_the_positions(folder):
    [caption] = load(folder).encoder.encode(["word " * 100]).values()
    assert len(caption.tokens) == 96  # positions 1 to 96, since the image needs one of the 128


def test_captions_are_cached_up_to_a_limit(folder, monkeypatch):
    model = load(folder)
    encoded: list[str] = []
    original = model.encoder._encode
    monkeypatch.setattr(model.encoder, "_encode", lambda m, text: encoded.append(text) or original(m, text))
    first = model.encoder.encode(["a", "b", "a"])
    assert encoded == ["a", "b"]
    assert model.encoder.encode(["b", "a"])["a"] is first["a"] and encoded == ["a", "b"]
    model.encoder._cache_bytes = sum(caption.tokens.nbytes for caption in first.values())
    assert model.encoder.encode(["c"]).keys() == {"c"}  # evicts b, which was used less recently than a
    model.encoder.encode(["a", "b"])
    assert encoded == ["a", "b", "c", "b"]
    assert CACHE_BYTES >= 2**20


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_models_are_on_the_device_only_during_use(folder, monkeypatch, offload):
    model, moves = load(folder, offload), []
    for hosted in (model.encoder.model, model.decoder.model):
        move = hosted._model.to
        monkeypatch.setattr(hosted._model, "to", lambda where, move=move: moves.append(str(where)) or move(where))
    monkeypatch.setattr("megarl.core.device.device", lambda: torch.device("cpu", 0))
    [caption] = model.encoder.encode(["cat"]).values()
    [image] = model.decoder.decode([torch.ones(4, 4, 4)])
    assert moves == (["cpu:0", "cpu"] if offload else ["cpu:0"]) * 2
    assert model.encoder.encode(["cat"])["cat"] is caption and len(moves) == 2 + 2 * offload  # cached
    assert image.shape == (8, 8, 3)


def test_shift_is_read_from_the_folder(folder):
    assert load(folder).shift == SHIFT


def edited(file: str, **keys: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return edit


def pickled(folder: Path) -> None:
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save({}, weights.with_suffix(".bin"))


def truncated(folder: Path) -> None:
    weights = folder / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown pipeline": (edited("model_index.json", _class_name="FluxPipeline"), "_class_name=.*FluxPipeline"),
    "unknown class": (edited("model_index.json", vae=["custom_module", "Loader"]), r"vae=.*Loader.*AutoencoderKL"),
    "missing part": (edited("model_index.json", text_encoder=None), "text_encoder=.*Qwen3Model"),
    "missing index": (lambda folder: (folder / "model_index.json").unlink(), "cannot be read"),
    "dynamic shift": (edited("scheduler/scheduler_config.json", use_dynamic_shifting=True), "use_dynamic_shifting"),
    "negative shift": (edited("scheduler/scheduler_config.json", shift=-1), "expected a positive number"),
    "unsupported transformer": (edited("transformer/config.json", qk_norm=False), "qk_norm"),
    "pickled weights": (pickled, "safetensors"),
    "truncated weights": (truncated, "not a complete safetensors file"),
    "another text encoder": (edited("transformer/config.json", cap_feat_dim=24), "cap_feat_dim=24"),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_unsupported_or_damaged_folder_is_refused(folder, tmp_path, case):
    corrupt, message = CORRUPTIONS[case]
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    corrupt(copy)
    with pytest.raises(UserError, match=message) as raised:
        load(copy)
    assert "Fix: " in str(raised.value)


def without(*parts: str) -> Callable[[Path], None]:
    return edited("model_index.json", **{part: [None, None] for part in parts})


SD3_CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing CLIP": (without("text_encoder_2"), "text_encoder_2=.*CLIPTextModelWithProjection"),
    "T5 without its tokenizer": (without("tokenizer_3"), "only one of text_encoder_3 and tokenizer_3"),
    "other transformer": (edited("model_index.json", transformer=["diffusers", "ZImageTransformer2DModel"]), "SD3Tr"),
    "other pooled caption": (edited("transformer/config.json", pooled_projection_dim=16), "pooled_projection_dim=16"),
    "other T5": (edited("transformer/config.json", joint_attention_dim=24), "20 channels.*joint_attention_dim=24"),
}


@pytest.mark.parametrize("case", SD3_CORRUPTIONS)
def test_unsupported_sd3_folder_is_refused(tmp_path, case):
    corrupt, message = SD3_CORRUPTIONS[case]
    copy = write_tiny_image_model(tmp_path / "model", "SD3.5")
    corrupt(copy)
    with pytest.raises(UserError, match=message):
        load(copy)


def test_too_few_channels_for_clip_are_refused(tmp_path):
    copy = write_tiny_image_model(tmp_path / "model", "SD3.5", has_t5=False)
    edited("transformer/config.json", joint_attention_dim=16)(copy)
    with pytest.raises(UserError, match=r"18 channels.*joint_attention_dim=16"):
        load(copy)


def test_code_in_the_folder_does_not_run(folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    ran = tmp_path / "ran"
    for part in ("text_encoder", "vae", "transformer", "tokenizer"):
        (copy / part / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nclass Model: pass\n")
        name = "tokenizer_config.json" if part == "tokenizer" else "config.json"
        classes = dict.fromkeys(("AutoModel", "AutoConfig"), "custom.Model") | {"AutoTokenizer": [None, "custom.Model"]}
        edited(f"{part}/{name}", auto_map=classes, _attn_implementation="someone/kernel")(copy)
    load(copy)
    assert not ran.exists()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), OSError(5, "Input/output error")])
def test_machine_faults_are_not_blamed_on_the_files(folder, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("diffusers.AutoencoderKL.from_pretrained", fail)
    with pytest.raises(type(error)) as raised:
        load(folder, False)
    assert raised.value is error
