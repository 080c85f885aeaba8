"""What is said of the models of a run before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cluster import model_folders
from megarl.cluster.model_folders import find_models
from megarl.config.load import load
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


def test_each_model_says_what_of_it_is_left_out(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(model_folders, "_check_tokenizer", lambda *_: None)
    plain = folder(tmp_path / "plain", num_nextn_predict_layers=0)
    predicting = folder(tmp_path / "predicting", num_nextn_predict_layers=1)
    overrides = ["data.source=arithmetic", "algorithm.advantage.estimator=gae", "implicit_reward.coefficient=1"]
    find_models(load(BASE, [f"model.path={plain}", f"implicit_reward.path={predicting}", *overrides]))
    part = "multi-token prediction (num_nextn_predict_layers=1)"
    assert capsys.readouterr().out == f"implicit_reward: {part} is not used\n"
    find_models(load(BASE, [f"model.path={predicting}", f"implicit_reward.path={plain}", *overrides]))
    said = capsys.readouterr().out.splitlines()
    assert said == [f"model: {part} is neither trained nor exported", f"critic: {part} is not used"]
