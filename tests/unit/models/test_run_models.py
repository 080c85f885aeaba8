"""Models of a run, found and identified before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.models import run_models
from megarl.models.folder import resolve_links
from megarl.models.run_models import ModelFolders, find_models
from tests.paths import BASE

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
