"""Models of a run, found and identified before it starts."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.models import run_models
from megarl.models.folder import resolve_links
from megarl.models.run_models import ModelFolders, check_local_models, find_models
from tests.paths import BASE
from tests.published_models import CONFIGS
from tests.tiny_denoiser import CONFIG

DEEPSEEK = dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=2,
    num_hidden_layers=2,
    intermediate_size=128,
    max_position_embeddings=8192,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)


def folder(path: Path, **changes: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(DEEPSEEK | changes))
    return path


def test_model_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link `latest` moves to the new run before its workers load the model."""
    real = folder(tmp_path / "first")
    (tmp_path / "latest").symlink_to("first")
    monkeypatch.chdir(tmp_path)
    paths = ["model.path=latest", "critic.path=./first", "implicit_reward.path=some/model"]
    overrides = ["data.source=arithmetic", "algorithm.advantage.estimator=gae", "implicit_reward.coefficient=1"]
    config = resolve_links(load(BASE, [*paths, *overrides]))
    assert (config.model.path, config.critic.path) == (str(real), str(real))
    assert (config.implicit_reward.path, config.reward_model.path) == ("some/model", None)
    assert find_models(load(BASE, ["model.path=latest", "data.source=arithmetic"])).actor == real


def test_models_are_identified_by_their_weights(tmp_path: Path) -> None:
    actor, other = folder(tmp_path / "actor"), folder(tmp_path / "other")
    for path in (actor, other):
        (path / "model.safetensors").write_text(path.name)
    identities = ModelFolders(actor, actor, None, other).identify()
    assert {key: value["folder"] for key, value in identities.items()} == {
        "model.path": str(actor),
        "implicit_reward.path": str(other),
    }
    assert identities["model.path"]["hash"] != identities["implicit_reward.path"]["hash"]


def test_untrained_parts_of_models_are_announced(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(run_models, "_check_tokenizer", lambda *_: None)
    plain = folder(tmp_path / "plain", num_nextn_predict_layers=0)
    predicting = folder(tmp_path / "predicting", num_nextn_predict_layers=1)
    overrides = ["data.source=arithmetic", "algorithm.advantage.estimator=gae", "implicit_reward.coefficient=1"]
    find_models(load(BASE, [f"model.path={plain}", f"implicit_reward.path={predicting}", *overrides]))
    part = "multi-token prediction (num_nextn_predict_layers=1)"
    assert capsys.readouterr().out == f"implicit_reward: {part} is not used\n"
    find_models(load(BASE, [f"model.path={predicting}", f"implicit_reward.path={plain}", *overrides]))
    said = capsys.readouterr().out.splitlines()
    assert said == [f"model: {part} is neither trained nor exported", f"critic: {part} is not used"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=192), "its vocab_size is 192, but that of model.path is 128, and vLLM requires equal sizes"),
        (dict(num_attention_heads=3), "rollout.speculative.path=*: rollout.tp=2: 3 attention heads"),
        (dict(architectures=["DeepseekV3ForSequenceClassification"]), "has no output layer to draft tokens with"),
        (CONFIGS["Qwen3.5-9B"], "rollout.speculative.path=*: the model has gated delta nets"),
        ({}, None),
    ],
)
def test_draft_model_fits_the_actor(changes, message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_models, "_check_tokenizer", lambda *_: None)
    actor, draft = folder(tmp_path / "actor"), folder(tmp_path / "draft", **dict(num_hidden_layers=1) | changes)
    keys = [f"model.path={actor}", "data.source=arithmetic", "rollout.tp=2"]
    config = load(BASE, [*keys, f"rollout.speculative={{method: draft_model, path: {draft}}}"])
    if message is None:
        assert find_models(config).draft == draft
        assert check_local_models(config)[0][-1].startswith(f"rollout.speculative.path={draft}: config.json is compat")
        return
    for find in (find_models, check_local_models):
        with pytest.raises(UserError) as refusal:
            find(config)
        assert fnmatchcase(str(refusal.value), f"*{message}*")


LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=2,
    num_hidden_layers=8,
    intermediate_size=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-6,
)
EAGLE = LLAMA | dict(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=96)
SPECULATORS = dict(
    architectures=["Eagle3Speculator"],
    speculators_model_type="eagle3",
    transformer_layer_config=LLAMA | dict(num_hidden_layers=1),
    draft_vocab_size=96,
    norm_before_residual=True,
)
MIXTRAL = LLAMA | dict(model_type="mixtral", architectures=["MixtralForCausalLM"])
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("actor", "draft", "message"),
    [
        (LLAMA, EAGLE, None),
        (LLAMA, EAGLE | dict(architectures=["LlamaForCausalLM"]), None),
        (LLAMA, SPECULATORS, None),
        (LLAMA, EAGLE | dict(hidden_size=32, target_hidden_size=64), None),
        (LLAMA | dict(num_hidden_layers=2), EAGLE | {"eagle_config": {LAYER_IDS: [0, 1, 2]}}, None),
        (LLAMA, LLAMA, "not an EAGLE-3 draft * architectures=[[]LlamaForCausalLM]). vLLM loads "),
        (LLAMA, EAGLE | dict(model_type="qwen3"), "not an EAGLE-3 draft that vLLM can load (model_type=qwen3, "),
        (LLAMA, EAGLE | dict(architectures=["PEagleDraftModel"]), "not an EAGLE-3 draft *=[[]PEagleDraftModel])"),
        (LLAMA, SPECULATORS | dict(speculators_model_type="dflash"), "model_type None is not supported"),
        (MIXTRAL, EAGLE, "vLLM does not return the hidden states of mixtral models"),
        (LLAMA, EAGLE | dict(hidden_size=96), "its hidden_size is 96, but the hidden_size of model.path is 64"),
        (LLAMA, EAGLE | dict(target_hidden_size=32), "its target_hidden_size is 32, but the hidden_size of model.path"),
        (LLAMA | dict(num_hidden_layers=5), EAGLE, "default must list 3 * from 0 to 5 *, but it is [[]2, 2, 2]"),
        (LLAMA, EAGLE | {LAYER_IDS: [1, 4, 9]}, f"{LAYER_IDS} must list 3 * from 0 to 8 *, but it is [[]1, 4, 9]"),
        (LLAMA, EAGLE | {LAYER_IDS: "1"}, f"{LAYER_IDS}='1': expected a list of integers"),
        (LLAMA, EAGLE | dict(vocab_size=192), "its vocab_size is 192, but that of model.path is 128"),
        (LLAMA, EAGLE | dict(draft_vocab_size=129), "its draft_vocab_size is 129, expected 1 to 128"),
        (LLAMA, EAGLE | dict(eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state=false, which vLLM"),
        (LLAMA, EAGLE | dict(num_attention_heads=1), "rollout.tp=2: 1 attention heads"),
    ],
)
def test_eagle_draft_fits_the_actor(actor, draft, message, tmp_path: Path) -> None:
    """The folder of a draft has no tokenizer."""
    folders = [folder(tmp_path / name) for name in ("actor", "draft")]
    for path, content in zip(folders, (actor, draft), strict=True):
        (path / "config.json").write_text(json.dumps(content))
    keys = [f"model.path={folders[0]}", "data.source=arithmetic", "rollout.tp=2"]
    config = load(BASE, [*keys, f"rollout.speculative={{method: eagle3, path: {folders[1]}}}"])
    for find in (find_models, check_local_models):
        with nullcontext() if message is None else pytest.raises(UserError) as refusal:
            found = find(config)
        if message is not None:
            assert fnmatchcase(str(refusal.value), f"*{message}*Fix: *")
        elif find is find_models:
            assert found.draft == folders[1]


@pytest.mark.parametrize("draft", [EAGLE, SPECULATORS])
def test_eagle_draft_requires_its_method(draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_models, "_check_tokenizer", lambda *_: None)
    actor, path = folder(tmp_path / "actor", **LLAMA), folder(tmp_path / "draft")
    (path / "config.json").write_text(json.dumps(draft))
    keys = [f"model.path={actor}", "data.source=arithmetic"]
    with pytest.raises(UserError, match=r"is an EAGLE-3 draft \(\w+\)\. Fix: set rollout.speculative.method=eagle3"):
        find_models(load(BASE, [*keys, f"rollout.speculative={{method: draft_model, path: {path}}}"]))


def test_unshared_prompts_of_recurrent_models_are_announced(tmp_path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "qwen"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS["Qwen3.5-9B"]))
    find_models(load(BASE, [f"model.path={path}", "data.source=arithmetic", "batch.samples_per_prompt=8"]))
    assert capsys.readouterr().out == (
        "model: gated delta nets carry a state along each sample, so samples do not share their prompt in training: "
        "each prompt is processed up to 8 times per pass\n"
    )


@pytest.fixture
def image_model(tmp_path: Path) -> Path:
    """The configs of an image model with 4 x 4 pixels per token, at most 16 x 16 tokens and 96 caption tokens."""
    configs = {
        "model_index.json": {},
        "transformer/config.json": CONFIG,
        "vae/config.json": {"block_out_channels": [8, 16]},
    }
    for name, content in configs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def find_image_model(folder: Path, *keys: str) -> None:
    size = "rollout.denoising={height: 16, width: 24}", "actor.tokens_per_microbatch=192"
    find_models(
        load(BASE, [f"model.path={folder}", "data.source=rows.jsonl", "rollout.engine=diffusers", *size, *keys])
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["rollout.denoising.height=18"],
            "rollout.denoising.height=18: expected a positive multiple of 2 pixels per latent x 2 latents per token = "
            "4, up to 16 tokens x 4 = 64. Fix: set rollout.denoising.height=16",
        ),
        (["rollout.denoising.width=68"], "rollout.denoising.width=68: expected * Fix: set rollout.denoising.width=64"),
        (["rollout.denoising.width=3"], "rollout.denoising.width=3: expected * Fix: set rollout.denoising.width=4"),
        (
            ["actor.tokens_per_microbatch=127"],
            "actor.tokens_per_microbatch=127: a denoising step can have (32 image + 96 caption) = 128 tokens and is "
            "never split over microbatches (127 < 128). Fix: set actor.tokens_per_microbatch to at least 128",
        ),
        (
            ["actor.tokens_per_microbatch=191", "rollout.denoising.guidance=2"],
            "actor.tokens_per_microbatch=191: a denoising step can have (32 image + 96 caption) + (32 image + 32 "
            "caption) = 192 tokens and is * Fix: set actor.tokens_per_microbatch to at least 192",
        ),
        (
            ["actor.tokens_per_microbatch=63", "actor.layout.cp=2"],
            "actor.tokens_per_microbatch=63: a denoising step can have (32 image + 96 caption) = 128 tokens on "
            "actor.layout.cp=2 ranks and is never split over microbatches (63 x 2 < 128). Fix: set "
            "actor.tokens_per_microbatch to at least 64",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(image_model, keys, message):
    with pytest.raises(UserError) as error:
        find_image_model(image_model, *keys)
    assert fnmatchcase(str(error.value), message), error.value
    remedy = message.rpartition("set ")[2].replace(" to at least ", "=")
    find_image_model(image_model, *keys, remedy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory). Fix: copy"),
        ({}, "block_out_channels=None: expected a list of integers. Fix: copy the file again"),
        ({"block_out_channels": []}, "block_out_channels=[]: expected a list of integers"),
    ],
)
def test_missing_size_of_latents_is_named(image_model, content, message):
    path = image_model / "vae" / "config.json"
    path.unlink() if content is None else path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        find_image_model(image_model)
    assert str(error.value).startswith(f"model.path: {path}: ")
